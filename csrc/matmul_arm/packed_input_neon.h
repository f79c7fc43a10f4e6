// Packed int8 activations of the NEON kernels. Each row is zero-padded to whole groups of 32
// values.
#pragma once
#include <arm_neon.h>

#include "matmul/outliers.h"
#include "matmul_arm/row_blocks.h"

namespace engine {
namespace {

// 32 activations of a row as int8, with their scale and sums. The struct fills one cache line of 64
// bytes.
struct InputGroup {
    int8_t values[kGroup];
    float shift[4];   // all four are -kRoundShift * scale
    float scale;      // its two low bits are zero, so that `shift` is exact
    float sum;        // scale * sum of the 32 values
    float halves[2];  // scale * sum of values 0-15, then of values 16-31
};

// Size of the packed activations in bytes. Within a block of rows, their order is [group][row].
ENGINE_INLINE size_t packed_bytes_int8(int rows, int columns) {
    return size_t(rows) * size_t(div_up(columns, kGroup)) * sizeof(InputGroup);
}

// Returns the absmax of 32 values. They are compared as uint32 bit patterns, where NaN is the
// largest.
ENGINE_INLINE float absmax_of(const float32x4_t (&x)[8]) {
    uint32x4_t magnitudes[8];
    for (int i = 0; i < 8; i++) magnitudes[i] = vreinterpretq_u32_f32(vabsq_f32(x[i]));
    for (int i = 0; i < 4; i++) magnitudes[i] = vmaxq_u32(magnitudes[i], magnitudes[i + 4]);
    uint32x4_t absmax_bits =
        vmaxq_u32(vmaxq_u32(magnitudes[0], magnitudes[1]), vmaxq_u32(magnitudes[2], magnitudes[3]));
    return bits_to_float(vmaxvq_u32(absmax_bits));
}

// Quantizes 16 values. Adding kRoundShift leaves the rounded integers in the low bits.
ENGINE_INLINE int8x16_t quantize_values(const float32x4_t* x, float factor) {
    int16x8_t words[4];
    for (int i = 0; i < 4; i++) {
        float32x4_t scaled = vmulq_n_f32(x[i], factor);
        __asm__("" : "+w"(scaled));  // keeps the product and the addition from becoming an FMA
        words[i] = vreinterpretq_s16_f32(vaddq_f32(scaled, vdupq_n_f32(kRoundShift)));
    }
    int16x8_t low = vuzp1q_s16(words[0], words[1]), high = vuzp1q_s16(words[2], words[3]);
    return vuzp1q_s8(vreinterpretq_s8_s16(low), vreinterpretq_s8_s16(high));
}

// Quantizes 32 activations. If one of them is NaN or infinite, the scale is not finite, and neither
// is any result computed from this group.
ENGINE_INLINE void pack_group(const float* from, InputGroup& out) {
    float32x4_t x[8];
    for (int i = 0; i < 8; i++) x[i] = vld1q_f32(from + 4 * i);
    float absmax = absmax_of(x);
    bool is_zero = absmax < 1e-30f;
    float inverse = is_zero ? 0.0f : 127.0f / absmax;
    float scale = is_zero ? 0.0f : bits_to_float(float_to_bits(absmax * (1 / 127.0f)) & ~3u);
    int8x16_t first = quantize_values(x, inverse), second = quantize_values(x + 4, inverse);
    vst1q_s8(out.values, first);
    vst1q_s8(out.values + 16, second);
    vst1q_f32(out.shift, vdupq_n_f32(-kRoundShift * scale));
    // The horizontal sums are arranged as {sum, first half, second half}, the order of the fields of
    // InputGroup after `scale`.
    const int32x4_t none = vdupq_n_s32(0);
    int32x4_t halves =
        vpaddq_s32(vdotq_s32(none, first, vdupq_n_s8(1)), vdotq_s32(none, second, vdupq_n_s8(1)));
    halves = vpaddq_s32(halves, halves);
    int32x4_t sums = vextq_s32(vpaddq_s32(halves, halves), halves, 2);
    float32x4_t scaled = vmulq_n_f32(vcvtq_f32_s32(sums), scale);
    vst1q_f32(&out.scale, vsetq_lane_f32(scale, scaled, 0));
}

}  // namespace
}  // namespace engine
