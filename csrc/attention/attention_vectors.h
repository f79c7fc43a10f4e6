// Vector operations for attention. Each including file is compiled for one instruction set, which
// sets the vector width. Some intrinsics are used in their masked form with all lanes on, because
// GCC 12 warns about the unmasked form.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "vector/vectors.h"

namespace engine {
namespace {

// kQueries: how many queries have their accumulators in registers at the same time. kColumns: how
// many vectors of head dimensions each of these queries has in PV.
#if defined(__AVX512F__)
constexpr int kQueries = 6, kColumns = 4;
#elif defined(__aarch64__)
constexpr int kQueries = 6, kColumns = 2;
#else
constexpr int kQueries = 4, kColumns = 2;
#endif

// kConvertsOnce: whether keys and values are converted to float once for all queries of a batch, if
// the batch has more than kQueries queries. kQueriesConverted: how many queries have their PV
// accumulators in registers at the same time in this case.
#if defined(__aarch64__)
constexpr bool kConvertsOnce = true;
constexpr int kQueriesConverted = 8;
#else
constexpr bool kConvertsOnce = false;
constexpr int kQueriesConverted = kQueries;
#endif

ENGINE_INLINE Floats vmax(Floats a, Floats b) {
#if defined(__aarch64__)
    return vmaxq_f32(a, b);
#else
    return a > b ? a : b;
#endif
}

#if defined(__AVX2__)
ENGINE_INLINE __m256 low_half(Floats a) {
#if defined(__AVX512F__)
    return _mm512_maskz_extractf32x8_ps(0xff, (__m512)a, 0);
#else
    return (__m256)a;
#endif
}

// The upper half of a 16-lane vector. An 8-lane vector is returned unchanged.
ENGINE_INLINE __m256 high_half(Floats a) {
#if defined(__AVX512F__)
    return _mm512_maskz_extractf32x8_ps(0xff, (__m512)a, 1);
#else
    return (__m256)a;
#endif
}

ENGINE_INLINE float reduce_max(Floats a) {
    __m256 eight = _mm256_max_ps(low_half(a), high_half(a));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

ENGINE_INLINE float reduce_sum(Floats a) {
    __m256 eight = low_half(a);
    if (kLanes == 16) eight = _mm256_add_ps(eight, high_half(a));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#elif defined(__aarch64__)
ENGINE_INLINE float reduce_max(Floats a) {
    return vmaxvq_f32(a);
}

ENGINE_INLINE float reduce_sum(Floats a) {  // (a[0] + a[1]) + (a[2] + a[3])
    return vaddvq_f32(a);
}
#else
ENGINE_INLINE float reduce_max(Floats a) {
    float first = a[0] > a[1] ? a[0] : a[1], second = a[2] > a[3] ? a[2] : a[3];
    return first > second ? first : second;
}

ENGINE_INLINE float reduce_sum(Floats a) {
    return (a[0] + a[1]) + (a[2] + a[3]);
}
#endif

// Loads pairs of bfloat16 and converts them to float. `first` gets the first elements of the pairs,
// `second` the second elements.
ENGINE_INLINE void widen_bf16_pairs(const uint8_t* from, Floats& first, Floats& second) {
    Words pairs = load_words(from);
    first = (Floats)(pairs << 16);
    second = (Floats)(pairs & 0xffff0000u);
}

// a * b + c
ENGINE_INLINE Floats vfma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

// a * factors[index] + c. At least `count` factors must be readable.
template <int count, int index>
ENGINE_INLINE Floats vfma_lane(Floats a, const float* factors, Floats c) {
    static_assert(index < count && (count == 2 || count == 4));
#if defined(__aarch64__)
    if constexpr (count == 2) return vfmaq_lane_f32(c, a, vld1_f32(factors), index);
    return vfmaq_laneq_f32(c, a, vld1q_f32(factors), index);
#else
    return vfma(a, all(factors[index]), c);
#endif
}

// coefficients[0] + x * (coefficients[1] + x * ...)
template <int N>
ENGINE_INLINE Floats polynomial(Floats x, const float (&coefficients)[N]) {
    Floats sum = all(coefficients[N - 1]);
    for (int i = N - 2; i >= 0; i--) sum = vfma(sum, x, all(coefficients[i]));
    return sum;
}

// exp2(x) for x <= 0, with a relative error of about 1e-7. Minus infinity gives exactly 0, NaN gives NaN.
ENGINE_INLINE Floats vexp2(Floats x) {
#if defined(__AVX512F__)
    // r is the fraction x - floor(x). `scalef` multiplies by 2 ** floor(x).
    const float coefficients[] = {
        1.0f,           6.931470444e-1f, 2.402293056e-1f, 5.548528058e-2f, 9.675451627e-3f, 1.246784596e-3f,
        2.161291642e-4f};
    __m512 r = _mm512_maskz_reduce_ps(0xffff, (__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = (__m512)polynomial((Floats)r, coefficients);
    return (Floats)_mm512_maskz_scalef_ps(0xffff, p, (__m512)x);
#else
    const Floats lowest = all(-125.0f);
    Floats bounded = x < lowest ? lowest : x;
    Floats shifted = bounded + kRoundShift;
    Floats r = bounded - (shifted - kRoundShift);
    const float coefficients[] = {
        1.0f,           6.931472029e-1f, 2.402264791e-1f, 5.550332471e-2f, 9.618437361e-3f, 1.339887457e-3f,
        1.535336144e-4f};
    Floats power = (Floats)((Words)polynomial(r, coefficients) + ((Words)shifted << 23));
    return x < lowest ? Floats{} : power;
#endif
}

}  // namespace
}  // namespace engine
