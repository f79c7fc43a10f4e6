// Elementary functions on vectors of 16 floats, with a relative error of about 2e-7. For NaN, the
// result is NaN. For infinity, the result is the limit of the function.
#pragma once
// GCC 12 warns about registers that its own intrinsics leave uninitialized on purpose.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "base/common.h"

namespace engine {
namespace {

// Mask of the first `count` lanes. `count` may be negative or above 16.
ENGINE_INLINE __mmask16 first_lanes(int count) {
    return count >= 16 ? __mmask16(0xffff) : count > 0 ? __mmask16((1 << count) - 1) : __mmask16(0);
}

ENGINE_INLINE __m512 load_halves(const uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// coefficients[0] + x * (coefficients[1] + x * ...)
template <int N>
ENGINE_INLINE __m512 polynomial(__m512 x, const float (&coefficients)[N]) {
    __m512 sum = _mm512_set1_ps(coefficients[N - 1]);
    for (int i = N - 2; i >= 0; i--) sum = _mm512_fmadd_ps(sum, x, _mm512_set1_ps(coefficients[i]));
    return sum;
}

ENGINE_INLINE __m512 vexp(__m512 x) {
    // Outside these bounds the result is infinite or zero anyway. NaN is the second operand of min
    // and max, which both return it unchanged.
    x = _mm512_max_ps(_mm512_set1_ps(-110.0f), _mm512_min_ps(_mm512_set1_ps(89.0f), x));
    __m512 power = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // ln 2 is split into two constants. The first has few bits, so its product with `power` is exact.
    __m512 rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(0.693359375f), x);
    rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(-2.12194440e-4f), rest);
    const float tail[] = {0.50000001201f,   0.16666665459f,   0.041665795894f,
                          8.3334519073e-3f, 1.3981999507e-3f, 1.9875691500e-4f};
    __m512 sum = _mm512_fmadd_ps(_mm512_mul_ps(rest, rest), polynomial(rest, tail), rest);
    return _mm512_scalef_ps(_mm512_add_ps(sum, _mm512_set1_ps(1.0f)), power);
}

ENGINE_INLINE __m512 vtanh(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const float near_zero[] = {1.0f, -0.33333111f, 0.13328055f, -0.053502911f, 0.019964704f, -5.0348547e-3f};
    __m512 size = _mm512_abs_ps(x);
    __m512 power = vexp(_mm512_mul_ps(size, _mm512_set1_ps(-2.0f)));
    __m512 large = _mm512_div_ps(_mm512_sub_ps(one, power), _mm512_add_ps(one, power));
    __m512 small = _mm512_mul_ps(size, polynomial(_mm512_mul_ps(x, x), near_zero));
    __mmask16 is_small = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.7f), _CMP_LT_OQ);
    __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));
    return _mm512_or_ps(_mm512_mask_mov_ps(large, is_small, small), sign);
}

ENGINE_INLINE __m512 verf(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const float near_zero[] = {1.12837912f,   -0.37612326f,  0.1128018f,
                               -0.026711308f, 4.9175469e-3f, -5.6314029e-4f};
    // erfc(z) * exp(z * z) = t * polynomial(t), with t = 1 / (1 + z / 2)
    const float complement[] = {0.282086850f, 0.282367813f,  0.243157781f, 0.202474922f,  -0.026128435f,
                                0.277350067f, -0.486576694f, 0.284275516f, -0.0590078613f};
    __m512 size = _mm512_abs_ps(x), square = _mm512_mul_ps(x, x);
    __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(size, _mm512_set1_ps(0.5f), one));
    __m512 power = vexp(_mm512_sub_ps(_mm512_setzero_ps(), square));
    __m512 large = _mm512_fnmadd_ps(_mm512_mul_ps(t, polynomial(t, complement)), power, one);
    __m512 small = _mm512_mul_ps(size, polynomial(square, near_zero));
    __mmask16 is_small = _mm512_cmp_ps_mask(size, one, _CMP_LT_OQ);
    __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));
    return _mm512_or_ps(_mm512_mask_mov_ps(large, is_small, small), sign);
}

}  // namespace
}  // namespace engine
