// Columns turned, 64 at a time, by a matrix of ones and minus ones (Hadamard's): the product of two rows that
// are turned is 64 times that of the rows, and what is large in one column is then spread over all 64.
#pragma once
#include "base/layout.h"
#include "vector/vectors.h"

namespace engine {
namespace {

constexpr int kHadamardSize = 64;
static_assert(kHadamardSize == kTileColumns);

// A panel's columns [columns][kPanelRows], a multiple of 64 of them, so that they meet turned rows: by a 64th.
void rotate_columns(float* values, int columns) {
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
