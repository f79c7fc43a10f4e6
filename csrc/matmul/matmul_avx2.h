// INT8 GEMM in registers of 256 bits, for AVX2 and AVX-VNNI. The sets differ in how they compute the exact
// integer dot product of a group: the class `Dots` of each. All float operations are here, so the results of
// both are bit-identical.
//
// With one or two rows, a panel is read once, and its 16 channels fill two registers. With more rows, up to six
// rows share each load of eight channels; six rows and their accumulators fill the registers.
#pragma once
#include <immintrin.h>

#include "base/dispatch.h"
#include "base/unroll.h"
#include "base/with_layout.h"
#include "matmul/packed_input.h"
#include "matmul/unit_blocks.h"

namespace engine {
namespace {

constexpr int kMaxRows = 6;

// 32 activations of a row: one cache line. The fields of sums have one value for each half of the group, and
// one for the group.
struct InputGroup {
    int8_t values[kGroup];
    float scale;
    float sums[3];       // scale * sum of the values
    int32_t offsets[3];  // -128 * sum of the values
    int32_t unused;
};
static_assert(sizeof(InputGroup) == 64);

ENGINE_INLINE size_t input_bytes(int rows, int columns) {
    return size_t(rows) * size_t(div_up(columns, kGroup)) * sizeof(InputGroup);
}

ENGINE_INLINE void pack_input(const float* x, InputGroup& out) {
    PackedGroup group;
    pack_group(x, group);
    memcpy(out.values, group.values, kGroup);
    out.scale = group.scale;
    const int32_t sums[] = {group.sums[0], group.sums[1], group.sums[0] + group.sums[1]};
    for (int i = 0; i < 3; i++) {
        out.sums[i] = float(sums[i]) * group.scale;
        out.offsets[i] = -128 * sums[i];
    }
    out.unused = 0;
}

void pack_rows(const float* x, int stride, int columns, int, int begin, int end, uint8_t* input) {
    const int groups = div_up(columns, kGroup);
    for (int row = begin; row < end; row++) {
        InputGroup* out = reinterpret_cast<InputGroup*>(input) + size_t(row) * size_t(groups);
        for_groups(x + size_t(row) * size_t(stride), columns,
                   [&](const float* group, int g) ALWAYS { pack_input(group, out[g]); });
    }
}

size_t input_bytes_outliers(int rows, int columns) {
    return bytes_with_outliers(input_bytes(rows, columns), rows, columns);
}

void pack_rows_outliers(const float* x, int stride, int columns, int rows, int begin, int end,
                        uint8_t* input) {
    const int groups = div_up(columns, kGroup);
    Outlier* lists = outliers_after(input, input_bytes(rows, columns));
    for (int row = begin; row < end; row++) {
        InputGroup* out = reinterpret_cast<InputGroup*>(input) + size_t(row) * size_t(groups);
        without_outliers(x + size_t(row) * size_t(stride), columns, lists + outliers_begin(row, groups),
                         [&](const float* group, int g) ALWAYS { pack_input(group, out[g]); });
    }
}

// Four values of each of eight channels of a group, as they are stored. `half` selects values 0-15 or 16-31,
// `quad` the four values within the half.
template <Layout layout>
ENGINE_INLINE __m256i stored_bytes(const uint8_t* group, int half, int quad) {
    const int index = is_4_bit(layout) ? quad : 4 * half + quad;
    __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + index * 64));
    if (!is_4_bit(layout)) return bytes;
    return _mm256_and_si256(half ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
}

ENGINE_INLINE __m256i broadcast_four(const int8_t* from) {
    int32_t four;
    memcpy(&four, from, sizeof four);
    return _mm256_set1_epi32(four);
}

// Scales the dot products of eight channels and adds them to the accumulators. `sum` is the index of the
// activation sum: a half of the group, or the whole.
template <Layout layout, int rows>
ENGINE_INLINE void add_scaled(const uint16_t* scales, const InputGroup* const* x, int sum,
                              const __m256i (&dots)[rows], __m256 (&sums)[rows]) {
    const __m256 scale = load_halves(scales);
    __m256 minimum = _mm256_setzero_ps();
    if (has_minima(layout)) minimum = load_halves(scales + scales_per_group(layout) * kPanelRows);
    unroll<rows>([&](auto r) ALWAYS {
        __m256 factor = _mm256_mul_ps(scale, _mm256_broadcast_ss(&x[r]->scale));
        sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r]), factor, sums[r]);
        if (has_minima(layout))
            sums[r] = _mm256_fmadd_ps(minimum, _mm256_broadcast_ss(&x[r]->sums[sum]), sums[r]);
    });
}

// Multiplies one group of eight channels, beginning at `group`, by `rows` rows.
template <class Dots, Layout layout, int rows>
ENGINE_INLINE void add_group(const uint8_t* group, const uint16_t* scales, const InputGroup* const* x,
                             __m256 (&sums)[rows]) {
    constexpr int kScales = scales_per_group(layout);
    unroll<kScales>([&](auto scale) ALWAYS {
        constexpr int kSum = kScales == 2 ? int(scale) : 2;
        __m256i dots[rows];
        unroll<rows>([&](auto r) ALWAYS { dots[r] = Dots::template start<layout>(x[r]->offsets[kSum]); });
        unroll<8 / kScales>([&](auto i) ALWAYS {
            constexpr int half = kScales == 2 ? int(scale) : i / 4, quad = i % 4;
            const auto weights = Dots::template load<layout>(stored_bytes<layout>(group, half, quad));
            unroll<rows>([&](auto r) ALWAYS {
                __m256i four = broadcast_four(x[r]->values + 16 * half + 4 * quad);
                dots[r] = Dots::template add<layout>(dots[r], weights, four);
                // The empty asm keeps this order of operations. Otherwise the compiler would compute all
                // products first and then add them as a tree.
                __asm__("" : "+x"(dots[r]));
            });
        });
        unroll<rows>([&](auto r)
                         ALWAYS { dots[r] = Dots::template finish<layout>(dots[r], x[r]->offsets[kSum]); });
        add_scaled<layout, rows>(scales + scale * kPanelRows, x, kSum, dots, sums);
    });
}

ENGINE_INLINE void prefetch_group(const uint8_t* group, size_t bytes) {
    constexpr size_t kAhead = 2048;
    for (size_t i = 0; i < bytes; i += 64)
        _mm_prefetch(reinterpret_cast<const char*>(group + kAhead + i), _MM_HINT_T0);
}

// Multiplies `rows` rows of activations by one panel. The accumulators of row r go to out + 32 r.
template <class Dots, Layout layout, int rows>
void multiply_panel(const uint8_t* panel, int groups, const InputGroup* input, float* out) {
    constexpr int kParts = rows <= 2 ? 2 : 1;  // registers of eight channels at a time
    for (int first = 0; first < kPanelRows; first += 8 * kParts) {
        __m256 sums[kParts][rows];
        const InputGroup* x[rows];
        unroll<rows>([&](auto r) ALWAYS {
            x[r] = input + size_t(r) * size_t(groups);
            unroll<kParts>([&](auto part) ALWAYS { sums[part][r] = _mm256_setzero_ps(); });
        });
        for (int g = 0; g < groups; g++) {
            const uint8_t* group = panel + size_t(g) * group_bytes(layout);
            const uint16_t* scales = scales_of<layout>(panel, groups, g) + first;
            if (kParts == 2) prefetch_group(group, group_bytes(layout));
            unroll<kParts>([&](auto part) ALWAYS {
                add_group<Dots, layout, rows>(group + 4 * first + 32 * part, scales + 8 * part, x,
                                              sums[part]);
            });
            unroll<rows>([&](auto r) ALWAYS { x[r]++; });
        }
        unroll<rows * kParts>([&](auto i) ALWAYS {
            _mm256_storeu_ps(out + i / kParts * 2 * kPanelRows + first + i % kParts * 8,
                             sums[i % kParts][i / kParts]);
        });
    }
}

template <class Dots, Layout layout, int... i>
auto panels_by_rows(int rows, std::integer_sequence<int, i...>) {
    using Multiply = void (*)(const uint8_t*, int, const InputGroup*, float*);
    static constexpr Multiply all[] = {multiply_panel<Dots, layout, i + 1>...};
    return all[rows - 1];
}

// Rows whose activations of `row_bytes` each stay in the L2 cache, as a multiple of `block`.
ENGINE_INLINE int pass_rows(size_t row_bytes, int block) {
    constexpr size_t kPassBytes = 256 << 10;
    const int blocks = int(kPassBytes / row_bytes) / block;
    return (blocks < 8 ? 8 : blocks) * block;
}

ENGINE_INLINE int even_block(int rows) {  // blocks of nearly the same size, at most kMaxRows
    return div_up(rows, div_up(rows, kMaxRows));
}

template <class Dots>
void matmul_int8(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    const int groups = job.weights->groups(), block = even_block(job.rows);
    auto input = reinterpret_cast<const InputGroup*>(job.input);
    with_layout(job.weights->layout, [&](auto layout) {
        if constexpr (layout < Layout::F16)
            multiply_units<layout, kMaxRows>(
                job, begin, end, pass_rows(size_t(groups) * sizeof(InputGroup), block), block, scratch,
                [&](const uint8_t* panel, int row, int rows, float* sums) {
                    auto sizes = std::make_integer_sequence<int, kMaxRows>();
                    panels_by_rows<Dots, layout>(rows, sizes)(panel, groups,
                                                              input + size_t(row) * size_t(groups), sums);
                });
    });
}

template <class Dots>
void matmul_int8_outliers(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    matmul_int8<Dots>(with_outliers(job, input_bytes(job.rows, job.weights->columns)), begin, end, scratch);
}

template <class Dots>
void fill_int8(Kernels& table) {
    constexpr int kInt8 = int(Numerics::INT8), kOutliers = int(Numerics::INT8_OUTLIERS);
    table.packed_bytes[kInt8] = input_bytes;
    table.pack[kInt8] = pack_rows;
    table.matmul[kInt8] = matmul_int8<Dots>;
    table.packed_bytes[kOutliers] = input_bytes_outliers;
    table.pack[kOutliers] = pack_rows_outliers;
    table.matmul[kOutliers] = matmul_int8_outliers<Dots>;
}

}  // namespace
}  // namespace engine
