// Reads the values, scales and minima of a weight panel (layout.h). Each function returns one
// vector, with one output channel per lane.
#pragma once
#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#include "base/layout.h"
#include "vector/vectors.h"

namespace engine {
namespace {

// Address of the scales [scale][16 channels] of a group. If the layout has minima, they follow the
// scales in the same order.
template <Layout layout>
ENGINE_INLINE const uint16_t* scales_of(const uint8_t* panel, int groups, int group) {
    size_t where = size_t(group) * group_bytes(layout) + (is_4_bit(layout) ? 256 : 512);
    if (layout == Layout::Q8) where = size_t(groups) * 512 + size_t(group) * 32;
    return reinterpret_cast<const uint16_t*>(panel + where);
}

#if defined(__AVX512F__)
ENGINE_INLINE Floats load_halves(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

ENGINE_INLINE Floats halves_to_floats(Ints halves) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)halves));
}
#elif defined(__F16C__)

ENGINE_INLINE Floats load_halves(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

ENGINE_INLINE Floats halves_to_floats(Ints halves) {
    __m256i words = (__m256i)(halves & 0xffff);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}
#elif defined(__ARM_FEATURE_DOTPROD)
ENGINE_INLINE Floats load_halves(const uint16_t* from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}

ENGINE_INLINE Floats halves_to_floats(Ints halves) {
    return vcvt_f32_f16(vreinterpret_f16_s16(vmovn_s32(halves)));
}
#else
// Converts halves to floats. Each half is in the low 16 bits of its lane.
ENGINE_INLINE Floats halves_to_floats(Ints halves) {
    Floats magnitude = (Floats)((halves & 0x7fff) << 13) * 0x1p112f;
    Ints special = (magnitude >= 65536.0f) & 0x7f800000;
    return (Floats)((Ints)magnitude | special | (halves & 0x8000) << 16);
}

ENGINE_INLINE Floats load_halves(const uint16_t* from) {
    typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));
    Shorts halves;
    memcpy(&halves, from, sizeof halves);
    return halves_to_floats(__builtin_convertvector(halves, Ints));
}
#endif

// Returns integer `k` of channels [n, n + kLanes) of a quantized group. Scale and minimum are not
// applied.
template <Layout layout>
ENGINE_INLINE Floats stored_values(const uint8_t* group, int k, int n) {
    constexpr bool nibbles = is_4_bit(layout);
    Ints four = (Ints)load_words(group + (nibbles ? k % 16 : k) / 4 * 64 + 4 * n);
    Ints value = four >> (k % 4 * 8 + (nibbles && k >= 16 ? 4 : 0)) & (nibbles ? 15 : 255);
    return __builtin_convertvector(value, Floats);
}

// Returns value `k` of channels [n, n + kLanes) of a group that is stored as F32, F16 or BF16.
template <Layout layout>
ENGINE_INLINE Floats float_values(const uint8_t* group, int k, int n) {
    if (layout == Layout::F32) return load(reinterpret_cast<const float*>(group) + k * kPanelRows + n);
    Ints pair = (Ints)load_words(group + (k / 2 * kPanelRows + n) * 4);
    if (layout == Layout::BF16) return (Floats)(k % 2 ? pair & int32_t(0xffff0000) : pair << 16);
    return halves_to_floats(k % 2 ? pair >> 16 : pair);
}

// Dequantizes a group to float [32 values][16 channels]. The loop over k is fully unrolled, so that
// its offsets and shifts are compile-time constants.
template <Layout layout>
ENGINE_INLINE void dequantize_group(const uint8_t* panel, int groups, int g, float* out) {
    const uint8_t* group = panel + size_t(g) * group_bytes(layout);
    for (int n = 0; n < kPanelRows; n += kLanes) {
        if constexpr (layout < Layout::F16) {
            constexpr int kScales = scales_per_group(layout);
            const uint16_t* scales = scales_of<layout>(panel, groups, g) + n;
            Floats scale[kScales], minimum[kScales] = {};
            for (int i = 0; i < kScales; i++) {
                scale[i] = load_halves(scales + i * kPanelRows);
                if (has_minima(layout)) minimum[i] = load_halves(scales + (kScales + i) * kPanelRows);
            }
#pragma GCC unroll 32
            for (int k = 0; k < kGroup; k++) {
                constexpr float offset = has_minima(layout) ? 0.0f : 128.0f;
                Floats value = (stored_values<layout>(group, k, n) - offset) * scale[k * kScales / kGroup];
                if (has_minima(layout)) value += minimum[k * kScales / kGroup];
                store(out + k * kPanelRows + n, value);
            }
        } else {
#pragma GCC unroll 32
            for (int k = 0; k < kGroup; k++)
                store(out + k * kPanelRows + n, float_values<layout>(group, k, n));
        }
    }
}

}  // namespace
}  // namespace engine
