// INT8_ROWS products in NEON: nothing but dot products of bytes, whose sums are scaled once for a whole row.
//
// A row is its unit times (254 * high + low), both whole numbers from -127 to 127. The unit is such that most
// pieces of 16 columns need no high part: at most one of kHighShare has one, if it is more than kUsualRange
// times as large as the others. High parts are kept apart from the low ones and multiplied row by row. What a
// few large values cost is a sixteenth of the work, not as much again.
//
// Packed rows, in blocks of at most twelve: [piece][row][16 low parts], then for each row its high parts.
#include <arm_neon.h>

#include <algorithm>
#include <cmath>

#include "dispatch.h"
#include "epilogue.h"
#include "repeat.h"
#include "round_panel.h"
#include "rounded.h"
#include "row_blocks.h"

namespace engine {
namespace {

constexpr int kPiece = 16;
constexpr int kHighShare = 16;
constexpr int kHighSteps = 254;
constexpr float kUsualRange = 1.5f;
constexpr int kVectors = kPanelRows / 4;

// The pieces of a row that have high parts: their numbers, padded to 16 bytes, then [count][16] values.
struct HighParts {
    float unit;
    int32_t count;
    int32_t unused[2];

    static constexpr int most(int columns) { return div_up(columns / kPiece, kHighShare); }
    static size_t numbers_bytes(int columns) { return round_up_size(size_t(most(columns)) * 4, 16); }
    static size_t bytes(int columns) {
        return sizeof(HighParts) + numbers_bytes(columns) + size_t(most(columns)) * kPiece;
    }
    int32_t* numbers() { return reinterpret_cast<int32_t*>(this + 1); }
    int8_t* values(int columns) { return reinterpret_cast<int8_t*>(numbers()) + numbers_bytes(columns); }
};

struct RowBlock {
    uint8_t* data;
    int rows, columns;  // columns padded to whole tiles of weights

    // `row` of all `rows` is somewhere in the block.
    RowBlock(const uint8_t* input, int all_rows, int all_columns, int row)
        : columns(round_up(all_columns, kTileColumns)) {
        const int size = block_rows(all_rows), first = row / size * size;
        rows = std::min(size, all_rows - first);
        data = const_cast<uint8_t*>(input) + size_t(first) * row_bytes(all_columns);
    }
    static size_t row_bytes(int columns) {
        const int padded = round_up(columns, kTileColumns);
        return size_t(padded) + HighParts::bytes(padded);
    }
    int pieces() const { return columns / kPiece; }
    int8_t* low(int row, int piece) const {
        return reinterpret_cast<int8_t*>(data) + (size_t(piece) * size_t(rows) + size_t(row)) * kPiece;
    }
    HighParts* high(int row) const {
        return reinterpret_cast<HighParts*>(data + size_t(rows) * size_t(columns) +
                                            size_t(row) * HighParts::bytes(columns));
    }
};

size_t packed_bytes(int rows, int columns) {
    return size_t(rows) * RowBlock::row_bytes(columns);
}

// 16 floats of a row, zero past the last column.
struct Piece {
    float32x4_t values[4];

    ALWAYS Piece(const float* x, int columns, int index) {
        float padded[kPiece] = {};
        const float* from = x + index * kPiece;
        if ((index + 1) * kPiece > columns) {
            for (int i = index * kPiece; i < columns; i++) padded[i % kPiece] = x[i];
            from = padded;
        }
        for (int i = 0; i < 4; i++) values[i] = vld1q_f32(from + 4 * i);
    }

    // The largest of each four without signs, as whole numbers: so ordered, NaN is above all.
    ALWAYS uint32x4_t peaks() const {
        uint32x4_t sizes[4];
        for (int i = 0; i < 4; i++) sizes[i] = vreinterpretq_u32_f32(vabsq_f32(values[i]));
        return vmaxq_u32(vmaxq_u32(sizes[0], sizes[1]), vmaxq_u32(sizes[2], sizes[3]));
    }
};

// Of each of four pieces.
ENGINE_INLINE uint32x4_t four_peaks(const float* x, int columns, int first) {
    uint32x4_t peaks[4];
    for (int i = 0; i < 4; i++) peaks[i] = Piece(x, columns, first + i).peaks();
    return vpmaxq_u32(vpmaxq_u32(peaks[0], peaks[1]), vpmaxq_u32(peaks[2], peaks[3]));
}

// Sixteen whole numbers.
struct Steps {
    int32x4_t values[4];

    ALWAYS bool are_bytes() const {
        int32x4_t sizes[4];
        for (int i = 0; i < 4; i++) sizes[i] = vabsq_s32(values[i]);
        return vmaxvq_s32(vmaxq_s32(vmaxq_s32(sizes[0], sizes[1]), vmaxq_s32(sizes[2], sizes[3]))) <= 127;
    }
    // Leaves the low parts.
    ALWAYS Steps take_high() {
        Steps high;
        for (int i = 0; i < 4; i++) {
            high.values[i] = vcvtnq_s32_f32(vmulq_n_f32(vcvtq_f32_s32(values[i]), 1.0f / kHighSteps));
            values[i] = vmlsq_n_s32(values[i], high.values[i], kHighSteps);
        }
        return high;
    }
    ALWAYS void store(int8_t* out) const {
        int16x8_t first = vcombine_s16(vmovn_s32(values[0]), vmovn_s32(values[1]));
        int16x8_t last = vcombine_s16(vmovn_s32(values[2]), vmovn_s32(values[3]));
        vst1q_s8(out, vcombine_s8(vqmovn_s16(first), vqmovn_s16(last)));
    }
};

// What one step of a row's low parts is worth. What is not finite makes it so, and with it all that is
// computed from the row.
float unit_of(const float* x, int columns, const RowBlock& block) {
    const int last = HighParts::most(block.columns);
    uint32_t largest[HighParts::most(kMaxRoundedColumns) + 1];  // in order, down to the first usual one
    std::fill_n(largest, last + 1, 0);
    for (int i = 0; i < block.pieces(); i += 4) {
        const uint32x4_t peaks = four_peaks(x, columns, i);
        if (vmaxvq_u32(peaks) <= largest[last]) continue;
        uint32_t found[4];
        vst1q_u32(found, peaks);
        for (uint32_t peak : found) {
            if (peak <= largest[last]) continue;
            int at = last;
            for (; at > 0 && largest[at - 1] < peak; at--) largest[at] = largest[at - 1];
            largest[at] = peak;
        }
    }
    const float first = bits_to_float(largest[0]), usual = bits_to_float(largest[last]);
    if (!std::isfinite(first)) return first;
    int at = last;
    while (at > 0 && bits_to_float(largest[at - 1]) <= kUsualRange * usual) at--;
    return std::max(bits_to_float(largest[at]) / 127.0f, first / float(127 * kHighSteps));
}

void pack_row(const float* x, int columns, const RowBlock& block, int row) {
    HighParts& parts = *block.high(row);
    parts.count = 0;
    parts.unit = unit_of(x, columns, block);
    if (parts.unit < 1e-32f) parts.unit = 0;
    const bool is_usual = parts.unit > 0 && std::isfinite(parts.unit);
    const float inverse = is_usual ? 1 / parts.unit : 0.0f;
    int8_t* high = parts.values(block.columns);
    for (int i = 0; i < block.pieces(); i++) {
        const Piece piece(x, columns, i);
        Steps low;
        for (int j = 0; j < 4; j++)
            low.values[j] = is_usual ? vcvtnq_s32_f32(vmulq_n_f32(piece.values[j], inverse)) : vdupq_n_s32(0);
        if (!low.are_bytes()) {
            low.take_high().store(high + parts.count * kPiece);
            parts.numbers()[parts.count++] = i;
        }
        low.store(block.low(row, i));
    }
}

void pack(const float* x, int stride, int columns, int rows, int begin, int end, uint8_t* input) {
    for (int row = begin; row < end; row++) {
        const RowBlock block(input, rows, columns, row);
        pack_row(x + size_t(row) * size_t(stride), columns, block, row % block_rows(rows));
    }
}

// sums[r] += weights of four outputs . 16 values of row r
template <int rows>
ENGINE_INLINE void add_piece(const uint8_t* weights, const int8_t* x, int32x4_t (&sums)[rows]) {
    int8x16_t words[4], values[rows];
    repeat<4>([&](auto i) ALWAYS { words[i] = vld1q_s8(reinterpret_cast<const int8_t*>(weights) + 64 * i); });
    repeat<rows>([&](auto r) ALWAYS { values[r] = vld1q_s8(x + r * kPiece); });
    repeat<4 * rows>([&](auto i) ALWAYS {
        __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[%3]"
                         : "+w"(sums[i % rows])
                         : "w"(words[i / rows]), "w"(values[i % rows]), "i"(i / rows));
    });
}

struct BlockSums {
    int32_t low[kBlockRows][kPanelRows];
};

using Multiply = void (*)(const uint8_t* panel, const RowBlock& block, BlockSums& out);

template <int rows>
void multiply_low(const uint8_t* panel, const RowBlock& block, BlockSums& out) {
    for (int v = 0; v < kVectors; v++) {
        int32x4_t sums[rows] = {};
        const uint8_t* weights = panel + 16 * v;
        const int8_t* x = block.low(0, 0);
        for (int i = 0; i < block.pieces(); i++, weights += kPiece * kPanelRows, x += rows * kPiece)
            add_piece<rows>(weights, x, sums);
        repeat<rows>([&](auto r) ALWAYS { vst1q_s32(out.low[r] + 4 * v, sums[r]); });
    }
}

template <int... i>
Multiply multiply_for(int rows, std::integer_sequence<int, i...>) {
    static constexpr Multiply all[] = {multiply_low<i + 1>...};
    return all[rows - 1];
}

// A row's sums as floats, with what its high parts add.
ENGINE_INLINE void scale_sums(const uint8_t* panel, const RowBlock& block, int row, const int32_t* low,
                              float32x4_t (&out)[kVectors]) {
    HighParts& parts = *block.high(row);
    const int8_t* values = parts.values(block.columns);
    int32x4_t high[kVectors] = {};
    for (int i = 0; i < parts.count; i++) {
        const auto* weights =
            reinterpret_cast<const int8_t*>(panel) + size_t(parts.numbers()[i]) * kPiece * kPanelRows;
        const int8x16_t x = vld1q_s8(values + i * kPiece);
        repeat<4 * kVectors>([&](auto j) ALWAYS {
            constexpr int word = j / kVectors, v = j % kVectors;
            high[v] = vdotq_laneq_s32(high[v], vld1q_s8(weights + 64 * word + 16 * v), x, word);
        });
    }
    const auto* scales = reinterpret_cast<const float*>(panel + size_t(block.columns) * kPanelRows);
    repeat<kVectors>([&](auto v) ALWAYS {
        float32x4_t sum =
            vfmaq_n_f32(vcvtq_f32_s32(vld1q_s32(low + 4 * v)), vcvtq_f32_s32(high[v]), float(kHighSteps));
        out[v] = vmulq_f32(vmulq_n_f32(sum, parts.unit), vld1q_f32(scales + 4 * v));
    });
}

// The rows of a block, of units whose sums are the outputs.
template <bool adds>
void finish_plain(const MatmulJob& job, int unit, int first, const RowBlock& block, const BlockSums& sums) {
    const uint8_t* panel = job.weights->panel(unit);
    for (int r = 0; r < block.rows; r++) {
        float32x4_t values[kVectors];
        scale_sums(panel, block, r, sums.low[r], values);
        float* out = job.epilogue.out + size_t(first + r) * size_t(job.epilogue.stride) + unit * kPanelRows;
        repeat<kVectors>([&](auto v) ALWAYS {
            vst1q_f32(out + 4 * v, adds ? vaddq_f32(vld1q_f32(out + 4 * v), values[v]) : values[v]);
        });
    }
}

// Of units whose outputs are gated by SiLU.
void finish_gated(const MatmulJob& job, int unit, int first, const RowBlock& block, const BlockSums* sums) {
    for (int r = 0; r < block.rows; r++) {
        float32x4_t gates[kVectors], values[kVectors];
        scale_sums(job.weights->panel(unit * 2), block, r, sums[0].low[r], gates);
        scale_sums(job.weights->panel(unit * 2 + 1), block, r, sums[1].low[r], values);
        float* out = job.epilogue.out + size_t(first + r) * size_t(job.epilogue.stride) + unit * kPanelRows;
        repeat<kVectors>([&](auto v) ALWAYS {
            vst1q_f32(out + 4 * v, activate<Activation::Silu>(Floats(gates[v])) * Floats(values[v]));
        });
    }
}

void finish_any(const MatmulJob& job, int unit, int first, const RowBlock& block, const BlockSums* sums) {
    const int panels = job.epilogue.gated ? 2 : 1;
    for (int r = 0; r < block.rows; r++) {
        float row[2][kPanelRows];
        for (int i = 0; i < panels; i++) {
            float32x4_t values[kVectors];
            scale_sums(job.weights->panel(unit * panels + i), block, r, sums[i].low[r], values);
            repeat<kVectors>([&](auto v) ALWAYS { vst1q_f32(row[i] + 4 * v, values[v]); });
        }
        finish_unit(job, unit, first + r, row[0]);
    }
}

void matmul(const MatmulJob& job, int begin, int end, uint8_t*) {
    const Epilogue& to = job.epilogue;
    const int panels = to.gated ? 2 : 1;
    const bool is_plain = !to.gated && !to.bias && to.activation == Activation::None;
    const bool is_silu = to.gated && !to.bias && !to.residual && to.activation == Activation::Silu;
    for (int unit = begin; unit < end; unit++)
        for (int first = 0; first < job.rows;) {
            const RowBlock block(job.input, job.rows, job.weights->columns, first);
            Multiply multiply = multiply_for(block.rows, std::make_integer_sequence<int, kBlockRows>());
            BlockSums sums[2];
            fetch_outputs(job, unit, first, block.rows);
            for (int i = 0; i < panels; i++) multiply(job.weights->panel(unit * panels + i), block, sums[i]);
            if (is_silu && unit_width(job, unit) == kPanelRows)
                finish_gated(job, unit, first, block, sums);
            else if (!is_plain || unit_width(job, unit) < kPanelRows)
                finish_any(job, unit, first, block, sums);
            else if (to.residual)
                finish_plain<true>(job, unit, first, block, sums[0]);
            else
                finish_plain<false>(job, unit, first, block, sums[0]);
            first += block.rows;
        }
}

}  // namespace

void fill_matmul_int8_rows_neon(Kernels& table) {
    constexpr int kRows = int(Numerics::INT8_ROWS);
    table.packed_bytes[kRows] = packed_bytes;
    table.pack[kRows] = pack;
    table.matmul[kRows] = matmul;
    table.round_panel = round_panel;
}

}  // namespace engine
