// Quantizes groups of 32 activations, for the generic and AVX2 kernels.
#pragma once
#include "matmul/outliers.h"

namespace engine {
namespace {

// 32 activations of a row, quantized for INT8 numerics: activation = scale * value.
struct PackedGroup {
    int8_t values[kGroup];
    int32_t sums[2];  // the sum of values 0-15, then that of values 16-31
    float scale;
};

// Quantizes 32 activations. If one of them is NaN or infinite, the scale is not finite, and neither
// is any result computed from this group.
ENGINE_INLINE void pack_group(const float* x, PackedGroup& out) {
    int32_t absmax_bits = 0;  // magnitudes are compared as bit patterns, where NaN is the largest
    for (int i = 0; i < kGroup; i++) {
        int32_t size = int32_t(float_to_bits(x[i]) & 0x7fffffff);
        absmax_bits = size > absmax_bits ? size : absmax_bits;
    }
    float absmax = bits_to_float(uint32_t(absmax_bits));
    bool is_zero = absmax < 1e-30f;
    float inverse = is_zero ? 0.0f : 127.0f / absmax;
    out.scale = is_zero ? 0.0f : absmax / 127.0f;
    float scaled[kGroup];
    for (int i = 0; i < kGroup; i++) scaled[i] = x[i] * inverse;
    __asm__("" : "+m"(scaled));  // keeps the product and the addition below from becoming an FMA
    for (int half = 0; half < 2; half++) {
        int32_t sum = 0;
        for (int i = half * 16; i < half * 16 + 16; i++) {
            int8_t value = int8_t(float_to_bits(scaled[i] + kRoundShift) & 0xff);
            out.values[i] = value;
            sum += value;
        }
        out.sums[half] = sum;
    }
}

}  // namespace
}  // namespace engine
