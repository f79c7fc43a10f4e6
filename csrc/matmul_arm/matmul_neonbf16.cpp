// BF16 GEMM with bfmmla, which multiplies two rows of activations by two channels, four columns at a time. The
// panels of a unit are dequantized to scratch memory, then multiplied by all rows of activations.
//
// Packed activations have the layout [pair of rows][four columns][row][column], dequantized panels the layout
// [four columns][channel][column]. Values past the last column or row are zero.
#include <arm_neon.h>

#include "base/dispatch.h"
#include "base/unroll.h"
#include "base/with_layout.h"
#include "matmul/dequantize.h"
#include "matmul/epilogue.h"

namespace engine {
namespace {

constexpr int kColumns = 4;                        // columns that one instruction multiplies
constexpr int kPieceValues = 2 * kColumns;         // values of two rows or two channels
constexpr int kGroupValues = kGroup * kPanelRows;  // of a dequantized group
constexpr int kPairs = 4;                          // pairs of rows whose accumulators are in registers
constexpr int kBlockRows = 2 * kPairs;
constexpr int kChannelPairs = 4;  // pairs of channels that are multiplied at a time

ENGINE_INLINE size_t pair_values(int columns) {
    return 2 * size_t(round_up(columns, kGroup));
}

size_t packed_bytes(int rows, int columns) {
    return size_t(div_up(rows, 2)) * pair_values(columns) * sizeof(bfloat16_t);
}

// Packs one row, or a row of zeros if `x` is null.
void pack_row(const float* x, int columns, int row, uint8_t* input) {
    auto out = reinterpret_cast<bfloat16_t*>(input) + size_t(row / 2) * pair_values(columns);
    out += row % 2 * kColumns;
    for (int k = 0; k < round_up(columns, kGroup); k += kColumns, out += kPieceValues) {
        float four[kColumns] = {};
        for (int i = 0; x && i < kColumns && k + i < columns; i++) four[i] = x[k + i];
        vst1_bf16(out, vcvt_bf16_f32(vld1q_f32(x && k + kColumns <= columns ? x + k : four)));
    }
}

// The thread that packs the last row also packs the row of zeros after it.
void pack(const float* x, int stride, int columns, int rows, int begin, int end, uint8_t* input) {
    for (int row = begin; row < end; row++) pack_row(x + size_t(row) * size_t(stride), columns, row, input);
    if (end == rows && rows % 2 == 1) pack_row(nullptr, columns, rows, input);
}

// Rounds column k of eight channels to bfloat16.
ENGINE_INLINE uint16x8_t round_column(const float* values, int k) {
    const float* from = values + k * kPanelRows;
    bfloat16x8_t low = vcvtq_low_bf16_f32(vld1q_f32(from));
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(low, vld1q_f32(from + 4)));
}

template <Layout layout>
void dequantize_panel(const uint8_t* panel, int groups, bfloat16_t* out) {
    for (int g = 0; g < groups; g++, out += kGroupValues) {
        float values[kGroupValues];
        dequantize_group<layout>(panel, groups, g, values);
        for (int k = 0; k < kGroup; k += kColumns)
            for (int n = 0; n < kPanelRows; n += 8) {
                uint16x8x4_t four = {{round_column(values + n, k), round_column(values + n, k + 1),
                                      round_column(values + n, k + 2), round_column(values + n, k + 3)}};
                vst4q_u16(reinterpret_cast<uint16_t*>(out + k * kPanelRows + n * kColumns), four);
            }
    }
}

// Multiplies `pairs` pairs of rows by one dequantized panel. The sums of row r go to out + 32 r.
template <int pairs>
void multiply_panel(const bfloat16_t* panel, const bfloat16_t* input, int columns, float* out) {
    for (int first = 0; first < kPanelRows; first += 2 * kChannelPairs, out += 2 * kChannelPairs) {
        float32x4_t sums[pairs][kChannelPairs];
        unroll<pairs * kChannelPairs>(
            [&](auto i) ALWAYS { sums[i / kChannelPairs][i % kChannelPairs] = vdupq_n_f32(0); });
        const bfloat16_t* weights = panel + first * kColumns;
        for (size_t k = 0; k < pair_values(columns); k += kPieceValues, weights += kColumns * kPanelRows) {
            bfloat16x8_t channels[kChannelPairs];
            unroll<kChannelPairs>([&](auto c)
                                      ALWAYS { channels[c] = vld1q_bf16(weights + c * kPieceValues); });
            unroll<pairs>([&](auto p) ALWAYS {
                const bfloat16x8_t rows = vld1q_bf16(input + p * pair_values(columns) + k);
                unroll<kChannelPairs>(
                    [&](auto c) ALWAYS { sums[p][c] = vbfmmlaq_f32(sums[p][c], rows, channels[c]); });
            });
        }
        unroll<pairs * kChannelPairs>([&](auto i) ALWAYS {
            constexpr int p = i / kChannelPairs, c = i % kChannelPairs;
            vst1_f32(out + p * 4 * kPanelRows + 2 * c, vget_low_f32(sums[p][c]));
            vst1_f32(out + (p * 4 + 2) * kPanelRows + 2 * c, vget_high_f32(sums[p][c]));
        });
    }
}

template <Layout layout>
void multiply_units(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    using Multiply = void (*)(const bfloat16_t*, const bfloat16_t*, int, float*);
    constexpr Multiply multiply[kPairs] = {multiply_panel<1>, multiply_panel<2>, multiply_panel<3>,
                                           multiply_panel<4>};
    const Matrix& weights = *job.weights;
    const int groups = weights.groups(), panels = job.epilogue.gated ? 2 : 1;
    auto dequantized = reinterpret_cast<bfloat16_t*>(scratch);
    auto input = reinterpret_cast<const bfloat16_t*>(job.input);
    for (int unit = begin; unit < end; unit++) {
        for (int i = 0; i < panels; i++)
            dequantize_panel<layout>(weights.panel(unit * panels + i), groups,
                                     dequantized + size_t(i * groups) * kGroupValues);
        for (int row = 0; row < job.rows; row += kBlockRows) {
            const int rows = job.rows - row < kBlockRows ? job.rows - row : kBlockRows;
            float sums[kBlockRows][2 * kPanelRows];
            prefetch_outputs(job, unit, row, rows);
            for (int i = 0; i < panels; i++)
                multiply[div_up(rows, 2) - 1](dequantized + size_t(i * groups) * kGroupValues,
                                              input + size_t(row / 2) * pair_values(weights.columns),
                                              weights.columns, sums[0] + i * kPanelRows);
            for (int r = 0; r < rows; r++) apply_epilogue(job, unit, row + r, sums[r]);
        }
    }
}

void matmul(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    with_layout(job.weights->layout, [&](auto layout) { multiply_units<layout>(job, begin, end, scratch); });
}

}  // namespace

// `scratch_bytes` stays that of the generic kernels, which has room for floats.
void fill_matmul_neonbf16(Kernels& table) {
    constexpr int kBf16 = int(Numerics::BF16);
    table.has_bf16 = true;
    table.packed_bytes[kBf16] = packed_bytes;
    table.pack[kBf16] = pack;
    table.matmul[kBf16] = matmul;
}

}  // namespace engine
