// BF16 GEMM with vdpbf16ps. Two panels of weights are dequantized to scratch memory, then
// multiplied by all rows of activations.
//
// Packed activations have the layout [row tile][group][16 rows][32 values]. Values past the last
// column or row are zero.
#include <utility>

#include "base/dispatch.h"
#include "matmul/dequantize_avx512.h"
#include "matmul/epilogue_avx512.h"

namespace engine {
namespace {

constexpr int kTileRows = 16;
constexpr int kBlockRows = 8;  // rows whose accumulators are in registers together

size_t packed_bytes(int rows, int columns) {
    return size_t(div_up(rows, kTileRows)) * size_t(div_up(columns, kGroup)) * kBf16GroupBytes;
}

size_t packed_offset(int groups, int row) {
    const size_t tile = size_t(row / kTileRows) * size_t(groups) * kBf16GroupBytes;
    return tile + size_t(row % kTileRows) * 64;
}

// Packs rows [begin, end). The thread that packs the last row also zeroes the padding rows of the
// last row tile.
void pack(const float* x, int stride, int columns, int rows, int begin, int end, uint8_t* input) {
    const int groups = div_up(columns, kGroup), rest = columns - (groups - 1) * kGroup;
    const __mmask32 lanes = rest == kGroup ? ~0u : (1u << rest) - 1;
    for (int row = begin; row < end; row++) {
        const float* from = x + size_t(row) * size_t(stride);
        uint8_t* to = input + packed_offset(groups, row);
        for (int g = 0; g < groups; g++, from += kGroup, to += kBf16GroupBytes) {
            __mmask32 mask = g == groups - 1 ? lanes : ~0u;
            __m512 low = _mm512_maskz_loadu_ps(__mmask16(mask), from);
            __m512 high = _mm512_maskz_loadu_ps(__mmask16(mask >> 16), from + 16);
            _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
    if (end < rows) return;
    for (int row = rows; row < round_up(rows, kTileRows); row++) {
        uint8_t* to = input + packed_offset(groups, row);
        for (int g = 0; g < groups; g++, to += kBf16GroupBytes)
            _mm512_store_si512(to, _mm512_setzero_si512());
    }
}

ENGINE_INLINE __m512 dot(__m512 sum, __m512i pairs, __m512i row) {
    return _mm512_dpbf16_ps(sum, (__m512bh)pairs, (__m512bh)row);
}

size_t (*other_scratch_bytes)(int columns);  // scratch size that the other numerics of the table need

size_t scratch_bytes(int columns) {
    const size_t other = other_scratch_bytes ? other_scratch_bytes(columns) : 0;
    const size_t two_panels = 2 * size_t(div_up(columns, kGroup)) * kBf16GroupBytes;
    return two_panels > other ? two_panels : other;
}

// Multiplies eight packed rows, starting at `row`, by two dequantized panels.
template <int... kRow>
ENGINE_INLINE void multiply_rows(const PairOutput& output, const uint8_t* input, const uint8_t* const* panels,
                                 int groups, int row, int rows, std::integer_sequence<int, kRow...>) {
    __m512 sums[2][kBlockRows] = {};
    for (int g = 0; g < groups; g++) {
        const uint8_t* values = input + size_t(g) * kBf16GroupBytes;
        const uint8_t* first = panels[0] + size_t(g) * kBf16GroupBytes;
        const uint8_t* second = panels[1] + size_t(g) * kBf16GroupBytes;
        for (int pair = 0; pair < kGroup / 2; pair++, values += 4, first += 64, second += 64) {
            const __m512i left = _mm512_load_si512(first), right = _mm512_load_si512(second);
            auto one_row = [&](int r) __attribute__((always_inline)) {
                int both;
                memcpy(&both, values + 64 * r, 4);
                const __m512i broadcast = _mm512_set1_epi32(both);
                sums[0][r] = dot(sums[0][r], left, broadcast);
                sums[1][r] = dot(sums[1][r], right, broadcast);
            };
            (one_row(kRow), ...);
        }
    }
    for (int r = 0; r < kBlockRows && row + r < rows; r++)
        store_pair_row(output, row + r, sums[0][r], sums[1][r]);
}

template <Layout kLayout>
const uint8_t* dequantize_panel(const Matrix& weights, int panel, uint8_t* scratch) {
    const uint8_t* from = weights.panel(panel);
    if constexpr (kLayout != Layout::BF16) {
        for (int g = 0; g < weights.groups(); g++)
            dequantize_group<kLayout>(from, g, weights.groups(), scratch + size_t(g) * kBf16GroupBytes);
        return scratch;
    }
    return from;
}

template <Layout kLayout>
void multiply(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    const Matrix& weights = *job.weights;
    const int groups = weights.groups(), factor = job.epilogue.gated ? 2 : 1;
    const size_t panel_size = size_t(groups) * kBf16GroupBytes;
    for (int panel = begin * factor; panel < end * factor; panel += 2) {
        const bool is_single = panel + 1 == end * factor;
        const uint8_t* first = dequantize_panel<kLayout>(weights, panel, scratch);
        const uint8_t* second =
            is_single ? first : dequantize_panel<kLayout>(weights, panel + 1, scratch + panel_size);
        const uint8_t* panels[2] = {first, second};
        const PairOutput output = pair_output(job, panel, is_single);
        for (int row = 0; row < job.rows; row += kBlockRows) {
            const uint8_t* input = job.input + packed_offset(groups, row);
            multiply_rows(output, input, panels, groups, row, job.rows,
                          std::make_integer_sequence<int, kBlockRows>());
        }
    }
}

void matmul(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    with_layout(job.weights->layout,
                [&](auto layout) { multiply<decltype(layout)::value>(job, begin, end, scratch); });
}

}  // namespace

void fill_matmul_avx512bf16(Kernels& table) {
    constexpr int kBf16 = int(Numerics::BF16);
    table.has_bf16 = true;
    table.packed_bytes[kBf16] = packed_bytes;
    table.pack[kBf16] = pack;
    table.matmul[kBf16] = matmul;
    other_scratch_bytes = table.scratch_bytes;
    table.scratch_bytes = scratch_bytes;
}

}  // namespace engine
