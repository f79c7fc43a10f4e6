// Makes int8 copies of quantized matrices, with one scale per output channel (layout I8). The copies are at
// least a third larger than the originals. But the kernels read them without dequantizing, and they scale
// each output only once.
#pragma once
#include <vector>

#include "base/kernels.h"
#include "base/memory.h"
#include "base/threads.h"

namespace engine {

// Max columns of a matrix. With more, a dot product of int8 values could overflow 32 bits.
constexpr int kMaxPerChannelColumns = 1 << 17;
static_assert(int64_t(kMaxPerChannelColumns) * 127 * 127 <= INT32_MAX);

struct StoredPanels {
    const Matrix* matrix;
    int panels;  // including the padding panels of gate and up, which `matrix` does not count
};

struct RequantizedMatrices {
    Block memory;
    std::vector<Matrix> matrices;  // in the order of the inputs
};

RequantizedMatrices requantize_matrices(const Kernels& kernels, ThreadPool& pool,
                                        const std::vector<StoredPanels>& from);

}  // namespace engine
