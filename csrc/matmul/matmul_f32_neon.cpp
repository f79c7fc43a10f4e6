// F32 GEMM in NEON. The 16 channels of a panel fill four registers. Up to four rows of activations
// share each load of the weights.
#include <arm_neon.h>

#include "base/dispatch.h"
#include "base/unroll.h"
#include "base/with_layout.h"
#include "matmul/matmul_f32.h"

namespace engine {
namespace {

constexpr int kVectors = kPanelRows / kLanes;

// Multiplies one dequantized group of weights by `rows` rows and adds the products to `sums`. The
// group has accumulators of its own, so that the CPU can overlap groups.
template <int rows>
void add_group_f32(const float* weights, const float* input, int stride, float* sums) {
    float32x4_t total[rows][kVectors];
    unroll<rows * kVectors>([&](auto i) ALWAYS { total[i / kVectors][i % kVectors] = vdupq_n_f32(0); });
    for (int k = 0; k < kGroup; k += 4, weights += 4 * kPanelRows) {
        float32x4_t x[rows];
        unroll<rows>([&](auto r) ALWAYS { x[r] = vld1q_f32(input + size_t(r) * size_t(stride) + k); });
        unroll<4>([&](auto i) ALWAYS {
            unroll<kVectors>([&](auto v) ALWAYS {
                float32x4_t four = vld1q_f32(weights + i * kPanelRows + v * 4);
                unroll<rows>([&](auto r)
                                 ALWAYS { total[r][v] = vfmaq_laneq_f32(total[r][v], four, x[r], i); });
            });
        });
    }
    unroll<rows * kVectors>([&](auto i) ALWAYS {
        float* out = sums + i / kVectors * 2 * kPanelRows + i % kVectors * 4;
        vst1q_f32(out, vaddq_f32(vld1q_f32(out), total[i / kVectors][i % kVectors]));
    });
}

void matmul_f32(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    constexpr AddGroup add[kBlock] = {add_group_f32<1>, add_group_f32<2>, add_group_f32<3>, add_group_f32<4>};
    with_layout(job.weights->layout,
                [&](auto layout) { multiply_units_f32<layout>(job, begin, end, scratch, add); });
}

}  // namespace

// `scratch_bytes` and `pack` stay those of the generic kernels.
void fill_matmul_f32_neon(Kernels& table) {
    table.matmul[int(Numerics::F32)] = matmul_f32;
}

}  // namespace engine
