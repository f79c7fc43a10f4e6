// The quantized weights of four channels in one group, in NEON registers.
#pragma once
#include <arm_neon.h>

#include "base/unroll.h"
#include "matmul/dequantize.h"

namespace engine {
namespace {

// Loads four values of each of four channels. The 32 values that four channels have in a group are
// eight such vectors.
template <Layout layout, int index>
ENGINE_INLINE int8x16_t load_values(const uint8_t* group) {
    if (!is_4_bit(layout)) {
        uint8x16_t bytes = vld1q_u8(group + index * 64);
        return vreinterpretq_s8_u8(veorq_u8(bytes, vdupq_n_u8(128)));
    }
    uint8x16_t bytes = vld1q_u8(group + index % 4 * 64);
    return vreinterpretq_s8_u8(index < 4 ? vandq_u8(bytes, vdupq_n_u8(15)) : vshrq_n_u8(bytes, 4));
}

template <Layout layout>
struct Weights {
    int8x16_t values[8];
    float32x4_t scales[scales_per_group(layout)], minima[scales_per_group(layout)];

    ALWAYS void load(const uint8_t* group, const uint16_t* stored) {
        unroll<8>([&](auto i) ALWAYS { values[i] = load_values<layout, i>(group); });
        unroll<scales_per_group(layout)>([&](auto i) ALWAYS {
            scales[i] = load_halves(stored + i * kPanelRows);
            if (has_minima(layout))
                minima[i] = load_halves(stored + (scales_per_group(layout) + i) * kPanelRows);
            if (layout == Layout::Q8M) minima[i] = vfmaq_n_f32(minima[i], scales[i], 128.0f);
        });
    }
};

}  // namespace
}  // namespace engine
