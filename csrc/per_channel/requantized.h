// Requantized int8 copies of quantized matrices with one scale per output channel (layout I8). They are at
// least a third larger than the originals, but the kernels read them without dequantizing and scale once per
// output.
#pragma once
#include <vector>

#include "base/kernels.h"
#include "base/memory.h"
#include "base/threads.h"

namespace engine {

// Above this, a dot product of int8 values could overflow 32 bits.
constexpr int kMaxPerChannelColumns = 1 << 17;
static_assert(int64_t(kMaxPerChannelColumns) * 127 * 127 <= INT32_MAX);

struct StoredPanels {
    const Matrix* matrix;
    int panels;  // includes the padding panels between gate and up, which `matrix` does not count
};

struct RequantizedMatrices {
    Block memory;
    std::vector<Matrix> matrices;  // in the order of the inputs
};

RequantizedMatrices requantize_matrices(const Kernels& kernels, ThreadPool& pool,
                                        const std::vector<StoredPanels>& from);

}  // namespace engine
