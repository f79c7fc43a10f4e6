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

// sum += weights * x[lane]. With intrinsics, GCC adds register moves between the multiplications, and the
// matmul takes a quarter more time.
template <int lane>
ENGINE_INLINE void multiply_add(float32x4_t& sum, float32x4_t weights, float32x4_t x) {
    __asm__("fmla %0.4s, %1.4s, %2.s[%c3]" : "+w"(sum) : "w"(weights), "w"(x), "i"(lane));
}

template <int rows>
void add_groups_f32(const float* weights, int groups, const float* input, int stride, float* sums) {
    float32x4_t total[rows][kVectors];
    auto of = [&](int i) { return sums + i / kVectors * 2 * kPanelRows + i % kVectors * 4; };
    unroll<rows * kVectors>([&](auto i) ALWAYS { total[i / kVectors][i % kVectors] = vld1q_f32(of(i)); });
    for (int k = 0; k < groups * kGroup; k += 4, weights += 4 * kPanelRows) {
        float32x4_t x[rows];
        unroll<rows>([&](auto r) ALWAYS { x[r] = vld1q_f32(input + size_t(r) * size_t(stride) + k); });
        unroll<4>([&](auto i) ALWAYS {
            unroll<kVectors>([&](auto v) ALWAYS {
                float32x4_t four = vld1q_f32(weights + i * kPanelRows + v * 4);
                unroll<rows>([&](auto r) ALWAYS { multiply_add<i>(total[r][v], four, x[r]); });
            });
        });
    }
    unroll<rows * kVectors>([&](auto i) ALWAYS { vst1q_f32(of(i), total[i / kVectors][i % kVectors]); });
}

void matmul_f32(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    constexpr AddGroups add[kBlock] = {add_groups_f32<1>, add_groups_f32<2>, add_groups_f32<3>,
                                       add_groups_f32<4>};
    with_layout(job.weights->layout,
                [&](auto layout) { multiply_units_f32<layout>(job, begin, end, scratch, add); });
}

}  // namespace

// `scratch_bytes` and `pack` stay those of the generic kernels.
void fill_matmul_f32_neon(Kernels& table) {
    table.matmul[int(Numerics::F32)] = matmul_f32;
}

}  // namespace engine
