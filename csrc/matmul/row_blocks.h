// Number of activation rows that the NEON kernels process together. All blocks have the same size; only the
// last may be smaller.
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
