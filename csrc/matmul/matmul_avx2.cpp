// Integer dot products with vpmaddubsw, which multiplies unsigned by signed bytes and adds pairs of products in
// 16 bits.
#include "matmul/matmul_avx2.h"

namespace engine {
namespace {

struct MaddDots {
    struct Weights {
        __m256i values, magnitudes;
    };

    // 8-bit weights are read as byte - 128.
    template <Layout layout>
    ENGINE_INLINE Weights load(__m256i bytes) {
        if (is_4_bit(layout)) return {bytes, bytes};
        __m256i values = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
        return {values, _mm256_abs_epi8(values)};
    }

    template <Layout layout>
    ENGINE_INLINE __m256i start(int32_t) {
        return _mm256_setzero_si256();
    }

    // 4-bit weights are accumulated in 16 bits, because the products of a whole group fit. For 8-bit weights,
    // only one pair of products fits into 16 bits, because x is in [-127, 127]; pairs are accumulated in 32.
    template <Layout layout>
    ENGINE_INLINE __m256i add(__m256i dots, const Weights& weights, __m256i x) {
        if (is_4_bit(layout)) return _mm256_add_epi16(dots, _mm256_maddubs_epi16(weights.values, x));
        __m256i pairs = _mm256_maddubs_epi16(weights.magnitudes, _mm256_sign_epi8(x, weights.values));
        return _mm256_add_epi32(dots, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }

    template <Layout layout>
    ENGINE_INLINE __m256i finish(__m256i dots, int32_t offset) {
        if (is_4_bit(layout)) return _mm256_madd_epi16(dots, _mm256_set1_epi16(1));
        return layout == Layout::Q8M ? _mm256_sub_epi32(dots, _mm256_set1_epi32(offset)) : dots;
    }
};

}  // namespace

// `scratch_bytes` stays that of the generic kernels, which is large enough.
void fill_matmul_avx2(Kernels& table) {
    fill_int8<MaddDots>(table);
}

}  // namespace engine
