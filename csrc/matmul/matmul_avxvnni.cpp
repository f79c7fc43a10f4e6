// Integer dot products with vpdpbusd, which multiplies unsigned by signed bytes and adds four products in 32
// bits. Weights are read as they are stored.
#include "matmul/matmul_avx2.h"
#include "matmul/vnni256.h"

namespace engine {
namespace {

struct VnniDots {
    template <Layout layout>
    ENGINE_INLINE __m256i load(__m256i bytes) {
        return bytes;
    }

    // Layouts without minima store byte = value + 128.
    template <Layout layout>
    ENGINE_INLINE __m256i start(int32_t offset) {
        return has_minima(layout) ? _mm256_setzero_si256() : _mm256_set1_epi32(offset);
    }

    template <Layout layout>
    ENGINE_INLINE __m256i add(__m256i dots, __m256i weights, __m256i x) {
        return add_dots(dots, weights, x);
    }

    template <Layout layout>
    ENGINE_INLINE __m256i finish(__m256i dots, int32_t) {
        return dots;
    }
};

}  // namespace

void fill_matmul_avxvnni(Kernels& table) {
    fill_int8<VnniDots>(table);
}

}  // namespace engine
