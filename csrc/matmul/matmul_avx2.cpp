// INT8 and F32 GEMM in AVX2. The 16 channels of a panel fill two registers. Up to four rows of
// activations share each load of the weights.
#include <immintrin.h>

#include "base/dispatch.h"
#include "base/unroll.h"
#include "base/with_layout.h"
#include "matmul/matmul_f32.h"
#include "matmul/packed_input.h"

namespace engine {
namespace {

ENGINE_INLINE __m256i load_bytes(const uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

// Loads four values of each of eight channels of a group. `half` selects values 0-15 or 16-31,
// `quad` the four values within the half, and `part` the first or last eight channels.
template <Layout layout>
ENGINE_INLINE __m256i load_values(const uint8_t* group, int half, int quad, int part) {
    if (!is_4_bit(layout)) {
        __m256i bytes = load_bytes(group + (4 * half + quad) * 64 + part * 32);
        return _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
    }
    __m256i bytes = load_bytes(group + quad * 64 + part * 32);
    return _mm256_and_si256(half ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
}

// Adds dot products of int8 weights and activations to `sums`. 4-bit weights are accumulated in 16
// bits, because the products of a whole group fit. For 8-bit weights, only one pair of products
// fits into 16 bits, because x is in [-127, 127]; pairs are accumulated in 32 bits.
template <Layout layout>
ENGINE_INLINE __m256i add_dot_products(__m256i sums, __m256i weights, __m256i x) {
    if (is_4_bit(layout)) return _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, x));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

ENGINE_INLINE __m256i broadcast_four(const int8_t* from) {
    int32_t four;
    memcpy(&four, from, sizeof four);
    return _mm256_set1_epi32(four);
}

// Multiplies integer dot products by their scales and adds them to the float accumulators `sums`.
// The dot products cover a group, or half a group in layouts with two scales per group.
template <Layout layout, int rows>
ENGINE_INLINE void add_scaled(const uint16_t* scales, const PackedGroup* const* x, int half,
                              __m256i (&dots)[rows][2], __m256 (&sums)[rows][2]) {
    unroll<2>([&](auto part) ALWAYS {
        __m256 scale = load_halves(scales + part * 8), minimum = _mm256_setzero_ps();
        if (has_minima(layout))
            minimum = load_halves(scales + scales_per_group(layout) * kPanelRows + part * 8);
        unroll<rows>([&](auto r) ALWAYS {
            __m256i dot = dots[r][part];
            int32_t sum = scales_per_group(layout) == 2 ? x[r]->sums[half] : x[r]->sums[0] + x[r]->sums[1];
            if (is_4_bit(layout)) dot = _mm256_madd_epi16(dot, _mm256_set1_epi16(1));
            if (layout == Layout::Q8M) dot = _mm256_add_epi32(dot, _mm256_set1_epi32(128 * sum));
            __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(x[r]->scale));
            sums[r][part] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), factor, sums[r][part]);
            if (has_minima(layout)) {
                __m256 scaled_sum = _mm256_set1_ps(float(sum) * x[r]->scale);
                sums[r][part] = _mm256_fmadd_ps(minimum, scaled_sum, sums[r][part]);
            }
            dots[r][part] = _mm256_setzero_si256();
        });
    });
}

// Multiplies `rows` rows of activations by one panel. The accumulators of row r go to out + 32 r.
template <Layout layout, int rows>
void multiply_panel(const uint8_t* panel, int groups, const PackedGroup* input, float* out) {
    __m256 sums[rows][2];
    __m256i dots[rows][2];
    const PackedGroup* x[rows];
    unroll<rows>([&](auto r) ALWAYS {
        x[r] = input + size_t(r) * size_t(groups);
        sums[r][0] = sums[r][1] = _mm256_setzero_ps();
        dots[r][0] = dots[r][1] = _mm256_setzero_si256();
    });
    for (int g = 0; g < groups; g++) {
        const uint8_t* group = panel + size_t(g) * group_bytes(layout);
        const uint16_t* scales = scales_of<layout>(panel, groups, g);
        unroll<2>([&](auto half) ALWAYS {
            unroll<4>([&](auto quad) ALWAYS {
                __m256i low = load_values<layout>(group, half, quad, 0);
                __m256i high = load_values<layout>(group, half, quad, 1);
                unroll<rows>([&](auto r) ALWAYS {
                    __m256i four = broadcast_four(x[r]->values + 16 * half + 4 * quad);
                    dots[r][0] = add_dot_products<layout>(dots[r][0], low, four);
                    dots[r][1] = add_dot_products<layout>(dots[r][1], high, four);
                    // The empty asm keeps this order of operations. Otherwise the compiler would
                    // compute all products first and then add them as a tree.
                    __asm__("" : "+x"(dots[r][0]), "+x"(dots[r][1]));
                });
            });
            if (scales_per_group(layout) == 2)
                add_scaled<layout, rows>(scales + half * kPanelRows, x, half, dots, sums);
        });
        if (scales_per_group(layout) == 1) add_scaled<layout, rows>(scales, x, 0, dots, sums);
        unroll<rows>([&](auto r) ALWAYS { x[r]++; });
    }
    unroll<rows>([&](auto r) ALWAYS {
        _mm256_storeu_ps(out + r * 2 * kPanelRows, sums[r][0]);
        _mm256_storeu_ps(out + r * 2 * kPanelRows + 8, sums[r][1]);
    });
}

template <Layout layout>
void multiply_quantized(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    using Multiply = void (*)(const uint8_t*, int, const PackedGroup*, float*);
    constexpr Multiply multiply[] = {multiply_panel<layout, 1>, multiply_panel<layout, 2>,
                                     multiply_panel<layout, 3>, multiply_panel<layout, 4>};
    const Matrix& weights = *job.weights;
    int groups = weights.groups(), panels = job.epilogue.gated ? 2 : 1;
    auto input = reinterpret_cast<const PackedGroup*>(job.input);
    OutlierUnit<layout> outliers(job, scratch);
    for (int unit = begin; unit < end; unit++) {
        outliers.start(unit);
        for (int row = 0; row < job.rows; row += kBlock) {
            int rows = job.rows - row < kBlock ? job.rows - row : kBlock;
            float sums[kBlock][2 * kPanelRows];
            for (int i = 0; i < panels; i++)
                multiply[rows - 1](weights.panel(unit * panels + i), groups,
                                   input + size_t(row) * size_t(groups), sums[0] + i * kPanelRows);
            for (int r = 0; r < rows; r++) {
                outliers.add(row + r, sums[r]);
                apply_epilogue(job, unit, row + r, sums[r]);
            }
        }
    }
}

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

void matmul_int8(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    with_layout(job.weights->layout, [&](auto layout) {
        if constexpr (layout < Layout::F16) multiply_quantized<layout>(job, begin, end, scratch);
    });
}

size_t packed_bytes_int8_outliers(int rows, int columns) {
    return bytes_with_outliers(packed_bytes_int8(rows, columns), rows, columns);
}

void matmul_int8_outliers(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    matmul_int8(with_outliers(job, packed_bytes_int8(job.rows, job.weights->columns)), begin, end, scratch);
}

void matmul_f32(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    constexpr AddGroups add[kBlock] = {add_groups_f32<1>, add_groups_f32<2>, add_groups_f32<3>,
                                       add_groups_f32<4>};
    with_layout(job.weights->layout,
                [&](auto layout) { multiply_units_f32<layout>(job, begin, end, scratch, add); });
}

}  // namespace

// `scratch_bytes` stays that of the generic kernels, which is large enough.
void fill_matmul_avx2(Kernels& table) {
    constexpr int kInt8 = int(Numerics::INT8), kOutliers = int(Numerics::INT8_OUTLIERS),
                  kF32 = int(Numerics::F32);
    table.pack[kInt8] = pack_int8;
    table.matmul[kInt8] = matmul_int8;
    table.packed_bytes[kOutliers] = packed_bytes_int8_outliers;
    table.pack[kOutliers] = pack_int8_outliers;
    table.matmul[kOutliers] = matmul_int8_outliers;
    table.pack[kF32] = pack_f32;
    table.matmul[kF32] = matmul_f32;
}

}  // namespace engine
