// vpdpbusd on 256 bits (AVX-VNNI).
#pragma once
#include <immintrin.h>

#include "base/common.h"

namespace engine {
namespace {

// In each 32-bit lane, adds to `sums` the dot product of four unsigned bytes and four signed bytes.
ENGINE_INLINE __m256i add_dots(__m256i sums, __m256i bytes, __m256i signed_bytes) {
#if defined(ENGINE_EMULATE_VNNI)
    // The same with AVX2, for emulators that lack the instruction. Each sum of 16 bits has one product.
    const __m256i even = _mm256_set1_epi16(0x00ff), ones = _mm256_set1_epi16(1);
    __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(bytes, even), signed_bytes);
    __m256i high = _mm256_maddubs_epi16(_mm256_andnot_si256(even, bytes), signed_bytes);
    __m256i dots = _mm256_add_epi32(_mm256_madd_epi16(low, ones), _mm256_madd_epi16(high, ones));
    return _mm256_add_epi32(sums, dots);
#else
    return _mm256_dpbusd_avx_epi32(sums, bytes, signed_bytes);
#endif
}

}  // namespace
}  // namespace engine
