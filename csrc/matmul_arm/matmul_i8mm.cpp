// INT8 GEMM with smmla, which multiplies two rows of activations by two channels. The integer dot products
// are exact and the float operations are those of matmul_neon.cpp, so the results of both are bit-identical.
// With fewer than kMinRows rows, the kernels of matmul_neon.cpp run.
//
// Packed activations are pairs of rows. Within a block of pairs, their order is [group][pair]. If the number
// of rows is odd, the last pair has a row of zeros.
#include "base/dispatch.h"
#include "base/with_layout.h"
#include "matmul/unit_blocks.h"
#include "matmul_arm/packed_input_neon.h"
#include "matmul_arm/weights_neon.h"

namespace engine {
namespace {

constexpr int kMinRows = 4;
constexpr int kBlockPairs = kBlockRows / 2;

// 32 activations of each of two rows. A field of four floats belongs to the products of two rows and two
// channels: its first two floats are for the first row.
struct PairGroup {
    int8_t values[4][2][8];  // [eight columns][row][column]
    float shift[4], scale[4], sum[4], halves[2][4];
};

Kernels neon;  // the table of matmul_neon.cpp

ENGINE_INLINE size_t pair_bytes(int rows, int columns) {
    return size_t(div_up(rows, 2)) * size_t(div_up(columns, kGroup)) * sizeof(PairGroup);
}

// Pairs in a block: the pairs are divided into as few blocks as possible.
ENGINE_INLINE int block_pairs(int rows) {
    const int pairs = div_up(rows, 2);
    return div_up(pairs, div_up(pairs, kBlockPairs));
}

// Writes one row of a pair.
ENGINE_INLINE void write_row(const InputGroup& from, int row, PairGroup& to) {
    unroll<4>([&](auto i) ALWAYS { vst1_s8(to.values[i][row], vld1_s8(from.values + 8 * i)); });
    auto both = [&](float* out, float value) ALWAYS { vst1_f32(out + 2 * row, vdup_n_f32(value)); };
    both(to.shift, from.shift[0]);
    both(to.scale, from.scale);
    both(to.sum, from.sum);
    both(to.halves[0], from.halves[0]);
    both(to.halves[1], from.halves[1]);
}

// Packs row `row`. `for_each` calls its argument for each group of the row, in ascending order.
template <class ForEach>
ENGINE_INLINE void pack_row(int columns, int rows, int row, uint8_t* input, ForEach for_each) {
    const int groups = div_up(columns, kGroup), pairs = div_up(rows, 2), pair = row / 2;
    const int block = block_pairs(rows), start = pair / block * block;
    const int step = pairs - start < block ? pairs - start : block;
    PairGroup* out = reinterpret_cast<PairGroup*>(input) + size_t(start) * size_t(groups) + pair - start;
    const bool is_alone = row % 2 == 0 && row + 1 == rows;
    for_each([&](const float* group, int g) ALWAYS {
        InputGroup packed, none{};
        pack_group(group, packed);
        write_row(packed, row % 2, out[g * step]);
        if (is_alone) write_row(none, 1, out[g * step]);
    });
}

size_t packed_bytes(int rows, int columns) {
    return rows < kMinRows ? neon.packed_bytes[int(Numerics::INT8)](rows, columns)
                           : pair_bytes(rows, columns);
}

void pack(const float* x, int stride, int columns, int rows, int begin, int end, uint8_t* input) {
    if (rows < kMinRows) return neon.pack[int(Numerics::INT8)](x, stride, columns, rows, begin, end, input);
    for (int row = begin; row < end; row++)
        pack_row(columns, rows, row, input,
                 [&](auto pack) ALWAYS { for_groups(x + size_t(row) * size_t(stride), columns, pack); });
}

size_t packed_bytes_outliers(int rows, int columns) {
    return bytes_with_outliers(packed_bytes(rows, columns), rows, columns);
}

void pack_outliers(const float* x, int stride, int columns, int rows, int begin, int end, uint8_t* input) {
    if (rows < kMinRows)
        return neon.pack[int(Numerics::INT8_OUTLIERS)](x, stride, columns, rows, begin, end, input);
    Outlier* lists = outliers_after(input, pair_bytes(rows, columns));
    for (int row = begin; row < end; row++)
        pack_row(columns, rows, row, input, [&](auto pack) ALWAYS {
            Outlier* list = lists + outliers_begin(row, div_up(columns, kGroup));
            without_outliers(x + size_t(row) * size_t(stride), columns, list, pack);
        });
}

// The weights of four channels as two pairs of channels.
template <Layout layout>
struct ChannelPairs {
    static constexpr int kScales = scales_per_group(layout);
    int8x16_t values[2][4];  // [pair][eight columns]: eight values of one channel, then of the other
    float32x4_t scales[2][kScales], minima[2][kScales];

    ALWAYS void load(const uint8_t* group, const uint16_t* stored) {
        Weights<layout> four;
        four.load(group, stored);
        unroll<4>([&](auto i) ALWAYS {
            int32x4_t low = vreinterpretq_s32_s8(four.values[2 * i]);
            int32x4_t high = vreinterpretq_s32_s8(four.values[2 * i + 1]);
            values[0][i] = vreinterpretq_s8_s32(vzip1q_s32(low, high));
            values[1][i] = vreinterpretq_s8_s32(vzip2q_s32(low, high));
        });
        unroll<kScales>([&](auto i) ALWAYS {
            repeat(four.scales[i], scales[0][i], scales[1][i]);
            if (has_minima(layout)) repeat(four.minima[i], minima[0][i], minima[1][i]);
        });
    }

    ALWAYS static void repeat(float32x4_t from, float32x4_t& low, float32x4_t& high) {
        low = vcombine_f32(vget_low_f32(from), vget_low_f32(from));
        high = vcombine_f32(vget_high_f32(from), vget_high_f32(from));
    }
};

// Adds the products of a pair of rows and a pair of channels in one group to `sums`.
template <Layout layout>
ENGINE_INLINE void add_group(const ChannelPairs<layout>& weights, int channels, const PairGroup& x,
                             float32x4_t& sums) {
    constexpr int kScales = scales_per_group(layout), kCount = 4 / kScales;
    unroll<kScales>([&](auto scale) ALWAYS {
        int32x4_t dots = vdupq_n_s32(kRoundShiftBits);
        unroll<kCount>([&](auto i) ALWAYS {
            constexpr int k = scale * kCount + i;
            dots = vmmlaq_s32(dots, vld1q_s8(x.values[k][0]), weights.values[channels][k]);
        });
        const float* input_sum = kScales == 2 ? x.halves[scale] : x.sum;
        if (has_minima(layout)) sums = vfmaq_f32(sums, weights.minima[channels][scale], vld1q_f32(input_sum));
        float32x4_t product = vfmaq_f32(vld1q_f32(x.shift), vreinterpretq_f32_s32(dots), vld1q_f32(x.scale));
        sums = vfmaq_f32(sums, product, weights.scales[channels][scale]);
    });
}

// Multiplies `pairs` pairs of rows by one panel, four channels at a time. The sums of row r go to out + 32 r.
template <Layout layout, int pairs>
void multiply_panel(const uint8_t* panel, int groups, const PairGroup* input, float* out) {
    for (int first = 0; first < kPanelRows; first += 4, out += 4) {
        float32x4_t sums[pairs][2];
        unroll<pairs>([&](auto p) ALWAYS { sums[p][0] = sums[p][1] = vdupq_n_f32(0); });
        const PairGroup* x = input;
        for (int g = 0; g < groups; g++, x += pairs) {
            ChannelPairs<layout> weights;
            weights.load(panel + size_t(g) * group_bytes(layout) + 4 * first,
                         scales_of<layout>(panel, groups, g) + first);
            unroll<2 * pairs>(
                [&](auto i) ALWAYS { add_group<layout>(weights, i % 2, x[i / 2], sums[i / 2][i % 2]); });
        }
        unroll<pairs>([&](auto p) ALWAYS {
            float64x2_t low = vreinterpretq_f64_f32(sums[p][0]), high = vreinterpretq_f64_f32(sums[p][1]);
            vst1q_f32(out + p * 4 * kPanelRows, vreinterpretq_f32_f64(vzip1q_f64(low, high)));
            vst1q_f32(out + (p * 4 + 2) * kPanelRows, vreinterpretq_f32_f64(vzip2q_f64(low, high)));
        });
    }
}

using Multiply = void (*)(const uint8_t* panel, int groups, const PairGroup* x, float* out);

template <Layout layout, int... i>
Multiply multiply_for(int pairs, std::integer_sequence<int, i...>) {
    static constexpr Multiply all[] = {multiply_panel<layout, i + 1>...};
    return all[pairs - 1];
}

void multiply_pairs(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    const int groups = job.weights->groups();
    auto input = reinterpret_cast<const PairGroup*>(job.input);
    with_layout(job.weights->layout, [&](auto layout) {
        if constexpr (layout < Layout::F16)
            multiply_units<layout, kBlockRows>(job, begin, end, job.rows, 2 * block_pairs(job.rows), scratch,
                                               [&](const uint8_t* panel, int row, int rows, float* sums) {
                                                   auto all = std::make_integer_sequence<int, kBlockPairs>();
                                                   multiply_for<layout>(div_up(rows, 2), all)(
                                                       panel, groups,
                                                       input + size_t(row / 2) * size_t(groups), sums);
                                               });
    });
}

void matmul(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    if (job.rows < kMinRows) return neon.matmul[int(Numerics::INT8)](job, begin, end, scratch);
    multiply_pairs(job, begin, end, scratch);
}

void matmul_outliers(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    if (job.rows < kMinRows) return neon.matmul[int(Numerics::INT8_OUTLIERS)](job, begin, end, scratch);
    multiply_pairs(with_outliers(job, pair_bytes(job.rows, job.weights->columns)), begin, end, scratch);
}

}  // namespace

void fill_matmul_i8mm(Kernels& table) {
    constexpr int kInt8 = int(Numerics::INT8), kOutliers = int(Numerics::INT8_OUTLIERS);
    neon = table;
    table.packed_bytes[kInt8] = packed_bytes;
    table.pack[kInt8] = pack;
    table.matmul[kInt8] = matmul;
    table.packed_bytes[kOutliers] = packed_bytes_outliers;
    table.pack[kOutliers] = pack_outliers;
    table.matmul[kOutliers] = matmul_outliers;
}

}  // namespace engine
