// Rows of activations that the NEON kernels take at a time. All blocks have one size except the last.
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
