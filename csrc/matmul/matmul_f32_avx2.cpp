// F32 GEMM in AVX2. The 16 channels of a panel fill two registers. Up to four rows of activations
// share each load of the weights.
#include <immintrin.h>

#include "base/dispatch.h"
#include "base/unroll.h"
#include "base/with_layout.h"
#include "matmul/matmul_f32.h"

namespace engine {
namespace {

// Multiplies one dequantized group of weights by `rows` rows and adds the products to `sums`. The
// sums of row r start at sums + 32 r. The group has accumulators of its own, so that the CPU can
// overlap groups.
template <int rows>
void add_groups_f32(const float* weights, int groups, const float* input, int stride, float* sums) {
    for (int g = 0; g < groups; g++, weights += kGroup * kPanelRows, input += kGroup) {
        __m256 total[rows][2];
        unroll<rows>([&](auto r) ALWAYS { total[r][0] = total[r][1] = _mm256_setzero_ps(); });
        for (int k = 0; k < kGroup; k++) {
            __m256 low = _mm256_loadu_ps(weights + k * kPanelRows);
            __m256 high = _mm256_loadu_ps(weights + k * kPanelRows + 8);
            unroll<rows>([&](auto r) ALWAYS {
                __m256 x = _mm256_broadcast_ss(input + size_t(r) * size_t(stride) + k);
                total[r][0] = _mm256_fmadd_ps(low, x, total[r][0]);
                total[r][1] = _mm256_fmadd_ps(high, x, total[r][1]);
            });
        }
        unroll<rows>([&](auto r) ALWAYS {
            float* out = sums + r * 2 * kPanelRows;
            _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), total[r][0]));
            _mm256_storeu_ps(out + 8, _mm256_add_ps(_mm256_loadu_ps(out + 8), total[r][1]));
        });
    }
}

void matmul_f32(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    constexpr AddGroups add[kBlock] = {add_groups_f32<1>, add_groups_f32<2>, add_groups_f32<3>,
                                       add_groups_f32<4>};
    with_layout(job.weights->layout,
                [&](auto layout) { multiply_units_f32<layout>(job, begin, end, scratch, add); });
}

}  // namespace

// `scratch_bytes` and `pack` stay those of the generic kernels.
void fill_matmul_f32_avx2(Kernels& table) {
    table.matmul[int(Numerics::F32)] = matmul_f32;
}

}  // namespace engine
