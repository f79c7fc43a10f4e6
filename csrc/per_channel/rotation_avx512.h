// The Hadamard rotation of activations (hadamard.h) and their largest value, in AVX-512.
#pragma once
#include <immintrin.h>

#include <cmath>

#include "base/layout.h"
#include "vector/vector_math_avx512.h"

namespace engine {
namespace {

// One stage of the Hadamard transform on 16 lanes. It replaces v[i] and v[i ^ apart] by their sum
// and difference. `swapped` holds v[i ^ apart] in lane i. `second` masks the lanes i in which the
// bit `apart` is set.
ENGINE_INLINE __m512 butterfly(__m512 v, __m512 swapped, __mmask16 second) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_fmadd_ps(v, _mm512_mask_sub_ps(one, second, _mm512_setzero_ps(), one), swapped);
}

ENGINE_INLINE __m512 hadamard16(__m512 v) {
    v = butterfly(v, _mm512_permute_ps(v, 0b10110001), 0xaaaa);
    v = butterfly(v, _mm512_permute_ps(v, 0b01001110), 0xcccc);
    v = butterfly(v, _mm512_shuffle_f32x4(v, v, 0b10110001), 0xf0f0);
    return butterfly(v, _mm512_shuffle_f32x4(v, v, 0b01001110), 0xff00);
}

// Rotates 64 values. Only the first `count` are read from memory; the others are zero.
ENGINE_INLINE void rotate_values(const float* from, int count, __m512 (&v)[4]) {
    for (int i = 0; i < 4; i++) {
        v[i] = hadamard16(_mm512_maskz_loadu_ps(first_lanes(count - 16 * i), from + 16 * i));
    }
    const __m512 sums[] = {_mm512_add_ps(v[0], v[1]), _mm512_add_ps(v[2], v[3])};
    const __m512 differences[] = {_mm512_sub_ps(v[0], v[1]), _mm512_sub_ps(v[2], v[3])};
    v[0] = _mm512_add_ps(sums[0], sums[1]);
    v[1] = _mm512_add_ps(differences[0], differences[1]);
    v[2] = _mm512_sub_ps(sums[0], sums[1]);
    v[3] = _mm512_sub_ps(differences[0], differences[1]);
}

// Returns the absmax of a row after its rotation. Values are compared as integer bit patterns,
// where NaN is the largest. If `rotated` is not null, it gets the rotated row, padded to 64 columns.
float rotated_absmax(const float* x, int columns, float* rotated = nullptr) {
    __m512i absmaxes = _mm512_setzero_si512();
    for (int k = 0; k < columns; k += kTileColumns) {
        __m512 v[4];
        rotate_values(x + k, columns - k, v);
        for (int i = 0; i < 4; i++) {
            const __m512i size = _mm512_and_si512(_mm512_castps_si512(v[i]), _mm512_set1_epi32(0x7fffffff));
            absmaxes = _mm512_max_epi32(absmaxes, size);
            if (rotated) _mm512_store_ps(rotated + k + 16 * i, v[i]);
        }
    }
    return bits_to_float(uint32_t(_mm512_reduce_max_epi32(absmaxes)));
}

// The scale that dequantizes the 8-bit values of a row, and its inverse. If the row's absmax is not finite, the
// scale is not, and all values are zero.
struct RowScale {
    float scale, inverse;
};

ENGINE_INLINE RowScale row_scale(float absmax) {
    const bool is_normal = absmax > 1e-30f && std::isfinite(absmax);
    return {is_normal || !std::isfinite(absmax) ? absmax / 127.0f : 0.0f, is_normal ? 127.0f / absmax : 0.0f};
}

}  // namespace
}  // namespace engine
