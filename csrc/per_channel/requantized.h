// Makes int8 copies of quantized matrices, with one scale per output channel (layout I8), for
// `--numerics fast`. Copies of 4-bit matrices are larger than the originals. In return, kernels
// read them without dequantizing and scale each output only once.
#pragma once
#include <vector>

#include "base/kernels.h"
#include "base/memory.h"
#include "base/threads.h"

namespace engine {

// Max columns of a matrix that can be requantized. With more columns, a dot product of int8 values
// could overflow 32 bits.
constexpr int kMaxPerChannelColumns = 1 << 17;
static_assert(int64_t(kMaxPerChannelColumns) * 127 * 127 <= INT32_MAX);

struct StoredPanels {
    const Matrix* matrix;
    int panels;  // counts padding panels of gate and up too, unlike `matrix`
};

struct RequantizedMatrices {
    Block memory;
    std::vector<Matrix> matrices;  // in the order of the inputs
};

RequantizedMatrices requantize_matrices(const Kernels& kernels, ThreadPool& pool,
                                        const std::vector<StoredPanels>& from);

}  // namespace engine
