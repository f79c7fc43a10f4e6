// `block_rows`: how many rows of activations the NEON kernels process together, out of `rows` rows.
// The rows are divided into as few blocks as possible. All blocks have the same size, except that
// the last may be smaller.
#pragma once
#include "base/common.h"

namespace engine {
namespace {

constexpr int kBlockRows = 12;

ENGINE_INLINE int block_rows(int rows) {
    return div_up(rows, div_up(rows, kBlockRows));
}

}  // namespace
}  // namespace engine
