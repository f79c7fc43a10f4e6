// 64-wide block Hadamard rotation of weight columns. Activations are rotated in the same way, which
// spreads their outliers over 64 columns. Without normalization, the dot product of two rotated
// vectors is 64 times that of the original vectors.
#pragma once
#include "base/layout.h"
#include "vector/vectors.h"

namespace engine {
namespace {

constexpr int kHadamardSize = 64;
static_assert(kHadamardSize == kTileColumns);

// Rotates the columns of a panel [columns][kPanelRows] and divides them by 64. Thanks to the
// division, their dot products with rotated activations equal those of the original vectors.
// `columns` is a multiple of 64.
inline void rotate_columns(float* values, int columns) {
    for (float* block = values; block < values + columns * kPanelRows; block += kHadamardSize * kPanelRows)
        for (int apart = 1; apart < kHadamardSize; apart *= 2)
            for (int k = 0; k < kHadamardSize / 2; k++) {
                float* first = block + (k / apart * 2 * apart + k % apart) * kPanelRows;
                float* second = first + apart * kPanelRows;
                for (int n = 0; n < kPanelRows; n += kLanes) {
                    const Floats one = load(first + n) * 0.5f, other = load(second + n) * 0.5f;
                    store(first + n, one + other);
                    store(second + n, one - other);
                }
            }
}

}  // namespace
}  // namespace engine
