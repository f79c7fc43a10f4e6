// What the per-channel int8 GEMMs of NEON and I8MM share: how activations are packed and results are stored. An
// int8 dot product runs over all of K, and each output is scaled only once.
//
// A row of activations has a few outliers, so a single int8 scale per row would leave few bits for
// the other values. Activations and weights are therefore Hadamard-rotated (hadamard.h). The
// rotation spreads outliers over 64 columns and does not change the dot products.
//
// Packed activations are stored in blocks of at most twelve rows. A block has the layout [piece of
// 16 columns][row][16], followed by one dequantization scale per row.
#pragma once
#include <arm_neon.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/dispatch.h"
#include "base/unroll.h"
#include "matmul/epilogue.h"
#include "matmul_arm/row_blocks.h"
#include "per_channel/requantize_panel.h"
#include "per_channel/requantized.h"

namespace engine {
namespace {

constexpr int kPiece = 16;
constexpr int kVectors = kPanelRows / 4;

struct RowBlock {
    uint8_t* data;
    int rows, columns;  // columns are padded to whole weight tiles

    // The block that contains row `row` of `all_rows` rows.
    RowBlock(const uint8_t* input, int all_rows, int all_columns, int row)
        : columns(round_up(all_columns, kTileColumns)) {
        const int size = block_rows(all_rows), first = row / size * size;
        rows = std::min(size, all_rows - first);
        data = const_cast<uint8_t*>(input) + size_t(first) * row_bytes(all_columns);
    }
    static size_t row_bytes(int columns) {
        return size_t(round_up(columns, kTileColumns)) + sizeof(float32x4_t);
    }
    int pieces() const { return columns / kPiece; }
    int8_t* values(int row, int piece) const {
        return reinterpret_cast<int8_t*>(data) + (size_t(piece) * size_t(rows) + size_t(row)) * kPiece;
    }
    float& scale(int row) const {
        return reinterpret_cast<float*>(data + size_t(rows) * size_t(columns))[row];
    }
};

size_t packed_bytes(int rows, int columns) {
    return size_t(rows) * RowBlock::row_bytes(columns);
}

// Rotates 64 values in registers. Returns the absmax of each lane.
ENGINE_INLINE float32x4_t rotate_values(const float* from, float* to) {
    static const float kEven[] = {1, -1, 1, -1}, kFirst[] = {1, 1, -1, -1};
    const float32x4_t even = vld1q_f32(kEven), first = vld1q_f32(kFirst);
    float32x4_t v[kHadamardSize / 4], absmaxes[4] = {};
    unroll<kHadamardSize / 4>([&](auto i) ALWAYS {
        v[i] = vld1q_f32(from + 4 * i);
        v[i] = vfmaq_f32(vrev64q_f32(v[i]), v[i], even);
        v[i] = vfmaq_f32(vextq_f32(v[i], v[i], 2), v[i], first);
    });
    unroll<4>([&](auto stage) ALWAYS {
        constexpr int apart = 1 << stage;
        unroll<kHadamardSize / 8>([&](auto k) ALWAYS {
            constexpr int i = k / apart * 2 * apart + k % apart;
            const float32x4_t one = v[i], other = v[i + apart];
            v[i] = vaddq_f32(one, other);
            v[i + apart] = vsubq_f32(one, other);
        });
    });
    unroll<kHadamardSize / 4>([&](auto i) ALWAYS {
        vst1q_f32(to + 4 * i, v[i]);
        absmaxes[i % 4] = vmaxq_f32(absmaxes[i % 4], vabsq_f32(v[i]));
    });
    return vmaxq_f32(vmaxq_f32(absmaxes[0], absmaxes[1]), vmaxq_f32(absmaxes[2], absmaxes[3]));
}

// Rotates a row of activations, zero-padded to whole tiles. Returns its absmax, or NaN if the row
// contains NaN.
float rotate_row(const float* x, int columns, std::vector<float>& to) {
    float32x4_t absmaxes = vdupq_n_f32(0);
    for (int i = 0; i < columns; i += kHadamardSize) {
        float padded[kHadamardSize] = {};
        const float* from = x + i;
        if (i + kHadamardSize > columns) from = std::copy(from, x + columns, padded) - (columns - i);
        absmaxes = vmaxq_f32(absmaxes, rotate_values(from, to.data() + i));
    }
    return vmaxvq_f32(absmaxes);
}

ENGINE_INLINE int8x16_t quantize16(const float* x, float inverse) {
    int16x4_t integers[4];
    for (int i = 0; i < 4; i++)
        integers[i] = vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 4 * i), inverse)));
    return vcombine_s8(vqmovn_s16(vcombine_s16(integers[0], integers[1])),
                       vqmovn_s16(vcombine_s16(integers[2], integers[3])));
}

// Packs one row. If the row contains NaN or infinity, its scale is not finite, and neither is any
// result of the row.
void pack_row(const float* x, int columns, const RowBlock& block, int row) {
    thread_local std::vector<float> rotated;
    rotated.resize(size_t(block.columns));
    const float absmax = rotate_row(x, columns, rotated);
    const bool is_normal = absmax > 1e-30f && std::isfinite(absmax);
    block.scale(row) = is_normal || !std::isfinite(absmax) ? absmax / 127 : 0.0f;
    const float inverse = is_normal ? 127 / absmax : 0.0f;
    for (int i = 0; i < block.pieces(); i++)
        vst1q_s8(block.values(row, i), quantize16(rotated.data() + i * kPiece, inverse));
}

void pack(const float* x, int stride, int columns, int rows, int begin, int end, uint8_t* input) {
    for (int row = begin; row < end; row++) {
        const RowBlock block(input, rows, columns, row);
        pack_row(x + size_t(row) * size_t(stride), columns, block, row % block_rows(rows));
    }
}

struct BlockSums {
    int32_t values[kBlockRows][kPanelRows];
};

using Multiply = void (*)(const uint8_t* panel, const RowBlock& block, BlockSums& out);

// Multiplies the accumulators of one row by the activation scale of the row and the scales of the
// channels.
ENGINE_INLINE void scale_sums(const uint8_t* panel, const RowBlock& block, int row, const BlockSums& sums,
                              float32x4_t (&out)[kVectors]) {
    const auto* scales = reinterpret_cast<const float*>(panel + size_t(block.columns) * kPanelRows);
    const float scale = block.scale(row);
    unroll<kVectors>([&](auto v) ALWAYS {
        float32x4_t sum = vcvtq_f32_s32(vld1q_s32(sums.values[row] + 4 * v));
        out[v] = vmulq_f32(vmulq_n_f32(sum, scale), vld1q_f32(scales + 4 * v));
    });
}

// Stores the results of a matmul without bias, activation and gate. If `accumulates`, they are
// added to the residual in `out`.
template <bool accumulates>
void store_plain(const MatmulJob& job, int unit, int first, const RowBlock& block, const BlockSums& sums) {
    const uint8_t* panel = job.weights->panel(unit);
    for (int r = 0; r < block.rows; r++) {
        float32x4_t values[kVectors];
        scale_sums(panel, block, r, sums, values);
        float* out = job.epilogue.out + size_t(first + r) * size_t(job.epilogue.stride) + unit * kPanelRows;
        unroll<kVectors>([&](auto v) ALWAYS {
            vst1q_f32(out + 4 * v, accumulates ? vaddq_f32(vld1q_f32(out + 4 * v), values[v]) : values[v]);
        });
    }
}

// Stores the results of a matmul with a SiLU gate, without bias and residual.
void store_gated(const MatmulJob& job, int unit, int first, const RowBlock& block, const BlockSums* sums) {
    for (int r = 0; r < block.rows; r++) {
        float32x4_t gates[kVectors], values[kVectors];
        scale_sums(job.weights->panel(unit * 2), block, r, sums[0], gates);
        scale_sums(job.weights->panel(unit * 2 + 1), block, r, sums[1], values);
        float* out = job.epilogue.out + size_t(first + r) * size_t(job.epilogue.stride) + unit * kPanelRows;
        unroll<kVectors>([&](auto v) ALWAYS {
            vst1q_f32(out + 4 * v, activate<Activation::Silu>(Floats(gates[v])) * Floats(values[v]));
        });
    }
}

void store_any(const MatmulJob& job, int unit, int first, const RowBlock& block, const BlockSums* sums) {
    const int panels = job.epilogue.gated ? 2 : 1;
    for (int r = 0; r < block.rows; r++) {
        float row[2][kPanelRows];
        for (int i = 0; i < panels; i++) {
            float32x4_t values[kVectors];
            scale_sums(job.weights->panel(unit * panels + i), block, r, sums[i], values);
            unroll<kVectors>([&](auto v) ALWAYS { vst1q_f32(row[i] + 4 * v, values[v]); });
        }
        apply_epilogue(job, unit, first + r, row[0]);
    }
}

// Multiplies units [begin, end). multiply[r - 1] multiplies a block of r rows by one panel.
void multiply_units(const MatmulJob& job, int begin, int end, const Multiply* multiply) {
    const Epilogue& to = job.epilogue;
    const int panels = to.gated ? 2 : 1;
    const bool is_bare = !to.bias && !to.delta;
    const bool is_plain = !to.gated && is_bare && to.activation == Activation::None;
    const bool is_silu = to.gated && is_bare && !to.residual && to.activation == Activation::Silu;
    for (int unit = begin; unit < end; unit++)
        for (int first = 0; first < job.rows;) {
            const RowBlock block(job.input, job.rows, job.weights->columns, first);
            BlockSums sums[2];
            prefetch_outputs(job, unit, first, block.rows);
            for (int i = 0; i < panels; i++)
                multiply[block.rows - 1](job.weights->panel(unit * panels + i), block, sums[i]);
            if (is_silu && unit_width(job, unit) == kPanelRows)
                store_gated(job, unit, first, block, sums);
            else if (!is_plain || unit_width(job, unit) < kPanelRows)
                store_any(job, unit, first, block, sums);
            else if (to.residual)
                store_plain<true>(job, unit, first, block, sums[0]);
            else
                store_plain<false>(job, unit, first, block, sums[0]);
            first += block.rows;
        }
}

using Matmul = void (*)(const MatmulJob& job, int begin, int end, uint8_t* scratch);

ENGINE_INLINE void fill_per_channel(Kernels& table, Matmul matmul) {
    constexpr int kRows = int(Numerics::INT8_PER_CHANNEL);
    table.packed_bytes[kRows] = packed_bytes;
    table.pack[kRows] = pack;
    table.matmul[kRows] = matmul;
    table.requantize_panel = requantize_panel;
}

}  // namespace
}  // namespace engine
