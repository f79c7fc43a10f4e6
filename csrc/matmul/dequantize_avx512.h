// Dequantizes weights of any layout to bfloat16. A group of a panel becomes [16 pairs][16
// channels][2], which is 1024 B. Both vdpbf16ps and the AMX tile multiply read this form.
//
// A quantized value q is placed into the mantissa of a float in [1, 2), at bit `place`. The float
// is then 1 + q * 2^(place - 23), and one FMA maps it to scale * q + minimum. Several places are
// possible, so most values can stay at the bits where they are stored and need no shift.
#pragma once
#include <immintrin.h>

#include "base/with_layout.h"
#include "vector/vector_math_avx512.h"

namespace engine {
namespace {

constexpr size_t kBf16GroupBytes = 1024;

// The affine map of 16 channels: float * scale + offset is the weight. The float in [1, 2) holds
// the quantized value in its mantissa.
struct MantissaAffine {
    __m512 scale, offset;
};

ENGINE_INLINE MantissaAffine mantissa_affine(int place, __m512 scale, __m512 minimum) {
    __m512 wide = _mm512_mul_ps(scale, _mm512_set1_ps(float(1 << (23 - place))));
    return {wide, _mm512_sub_ps(minimum, wide)};
}

// Applies the affine map to the quantized values in `bits`. `mask` selects the bits of the value.
ENGINE_INLINE __m512 apply_affine(const MantissaAffine& affine, __m512i bits, int mask) {
    const __m512i one = _mm512_set1_epi32(0x3f800000);
    __m512i number = _mm512_ternarylogic_epi32(bits, _mm512_set1_epi32(mask), one, 0xea);  // a & b | c
    return _mm512_fmadd_ps(_mm512_castsi512_ps(number), affine.scale, affine.offset);
}

// Rounds two values of each channel to bfloat16 and stores them interleaved. Ties are rounded away from zero,
// which takes fewer instructions than ties to even.
ENGINE_INLINE void store_pair(uint8_t* out, __m512 first, __m512 second) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    __m512i low = _mm512_add_epi32(_mm512_castps_si512(first), half);
    __m512i high = _mm512_add_epi32(_mm512_castps_si512(second), half);
    // The upper two bytes of each float in `low` become the lower two bytes of the float in `high`.
    const __m512i upper =
        _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 0, 0, 6, 7, 0, 0, 10, 11, 0, 0, 14, 15, 0, 0));
    _mm512_store_si512(out, _mm512_mask_shuffle_epi8(high, 0x3333333333333333, low, upper));
}

// Dequantizes the 256 B of nibbles of a group. `low` is the affine map for values 0-15, `high` the
// one for values 16-31.
ENGINE_INLINE void dequantize_nibbles(const uint8_t* from, const MantissaAffine& low,
                                      const MantissaAffine& high, uint8_t* out) {
    constexpr int kLow = 0xf0000, kHigh = 0xf000;  // places 16 and 12
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++, out += 128) {
        __m512i bits = _mm512_load_si512(from + 64 * j);
        __m512i left = _mm512_slli_epi32(bits, 8), right = _mm512_srli_epi32(bits, 8);
        __m512i first = _mm512_slli_epi32(bits, 16), last = _mm512_srli_epi32(bits, 16);
        store_pair(out, apply_affine(low, first, kLow), apply_affine(low, left, kLow));
        store_pair(out + 64, apply_affine(low, bits, kLow), apply_affine(low, right, kLow));
        store_pair(out + 512, apply_affine(high, left, kHigh), apply_affine(high, bits, kHigh));
        store_pair(out + 576, apply_affine(high, right, kHigh), apply_affine(high, last, kHigh));
    }
}

// Dequantizes 256 B of 8-bit values: values 0-15 or 16-31 of a group.
ENGINE_INLINE void dequantize_bytes(const uint8_t* from, const MantissaAffine& affine, uint8_t* out) {
    constexpr int kMask = 0xff00;  // place 8
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++, out += 128) {
        __m512i bits = _mm512_load_si512(from + 64 * j);
        __m512i first = _mm512_slli_epi32(bits, 8);
        __m512i third = _mm512_srli_epi32(bits, 8), last = _mm512_srli_epi32(bits, 16);
        store_pair(out, apply_affine(affine, first, kMask), apply_affine(affine, bits, kMask));
        store_pair(out + 64, apply_affine(affine, third, kMask), apply_affine(affine, last, kMask));
    }
}

// Returns the affine map for layouts whose bytes have an offset of 128. The map's offset is -scale
// * (2^15 + 128). This product is exact, because the scale is a half and has only 11 significant
// bits.
ENGINE_INLINE MantissaAffine centered_affine(const uint8_t* scales) {
    __m512 scale = load_halves(scales);
    return mantissa_affine(8, scale, _mm512_mul_ps(scale, _mm512_set1_ps(-128.0f)));
}

ENGINE_INLINE void convert_f16(const uint8_t* from, uint8_t* out) {
#pragma GCC unroll 4
    for (int pair = 0; pair < 16; pair++, from += 64, out += 64) {
        __m512bh rounded = _mm512_cvtne2ps_pbh(load_halves(from + 32), load_halves(from));
        _mm512_store_si512(out, (__m512i)rounded);
    }
}

ENGINE_INLINE void convert_f32(const uint8_t* from, uint8_t* out) {
    const __m512i rows = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i both = _mm512_or_si512(rows, _mm512_slli_epi32(rows, 16));
    const __m512i interleave = _mm512_or_si512(both, _mm512_set1_epi32(16 << 16));
#pragma GCC unroll 4
    for (int pair = 0; pair < 16; pair++, from += 128, out += 64) {
        __m512bh rounded = _mm512_cvtne2ps_pbh(_mm512_load_ps(from + 64), _mm512_load_ps(from));
        _mm512_store_si512(out, _mm512_permutexvar_epi16(interleave, (__m512i)rounded));
    }
}

// Dequantizes one group of a panel, and prefetches bytes of the panel that are needed a few groups
// later.
template <Layout kLayout>
ENGINE_INLINE void dequantize_group(const uint8_t* panel, int group, int groups, uint8_t* out) {
    const size_t bytes = group_bytes(kLayout);
    const uint8_t* from = panel + size_t(group) * bytes;
    constexpr int kAhead = 2048;
    for (size_t line = 0; line < bytes; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(from + kAhead + line), _MM_HINT_T0);
    if constexpr (kLayout == Layout::Q4) {
        __m512 scale = load_halves(from + 256), minimum = load_halves(from + 288);
        dequantize_nibbles(from, mantissa_affine(16, scale, minimum), mantissa_affine(12, scale, minimum),
                           out);
    } else if constexpr (kLayout == Layout::Q4G16) {
        MantissaAffine low = mantissa_affine(16, load_halves(from + 256), load_halves(from + 320));
        MantissaAffine high = mantissa_affine(12, load_halves(from + 288), load_halves(from + 352));
        dequantize_nibbles(from, low, high, out);
    } else if constexpr (kLayout == Layout::Q8) {
        MantissaAffine affine = centered_affine(panel + size_t(groups) * bytes + size_t(group) * 32);
        dequantize_bytes(from, affine, out);
        dequantize_bytes(from + 256, affine, out + 512);
    } else if constexpr (kLayout == Layout::Q8M) {
        MantissaAffine affine = mantissa_affine(8, load_halves(from + 512), load_halves(from + 544));
        dequantize_bytes(from, affine, out);
        dequantize_bytes(from + 256, affine, out + 512);
    } else if constexpr (kLayout == Layout::Q8G16) {
        dequantize_bytes(from, centered_affine(from + 512), out);
        dequantize_bytes(from + 256, centered_affine(from + 544), out + 512);
    } else if constexpr (kLayout == Layout::F16) {
        convert_f16(from, out);
    } else {
        static_assert(kLayout == Layout::F32, "bfloat16 weights need no decoding");
        convert_f32(from, out);
    }
}

}  // namespace
}  // namespace engine
