// Second copies of quantized matrices, requantized to 8 bits with one scale for each row (layout I8): a third
// larger or more than what they are made from, but read as they lie, and scaled once for a whole row.
#pragma once
#include <vector>

#include "base/kernels.h"
#include "base/memory.h"
#include "base/threads.h"

namespace engine {

// Beyond it a sum of products of bytes could leave 32 bits.
constexpr int kMaxPerChannelColumns = 1 << 17;
static_assert(int64_t(kMaxPerChannelColumns) * 127 * 127 <= INT32_MAX);

struct StoredPanels {
    const Matrix* matrix;
    int panels;  // padding between gate and up counts, which the matrix does not know of
};

struct RequantizedMatrices {
    Block memory;
    std::vector<Matrix> matrices;  // as many as were given, in their order
};

RequantizedMatrices requantize_matrices(const Kernels& kernels, ThreadPool& pool,
                                        const std::vector<StoredPanels>& from);

}  // namespace engine
