// Per-channel int8 GEMM with AMX tiles. It computes two panels at a time and loads weight tiles
// from memory without conversion.
//
// Activations are Hadamard-rotated (hadamard.h) and quantized with one scale per row. The
// accumulators over all of K are exact integers, so every order of accumulation gives the same
// result. While the tile unit multiplies 32 rows, the vector units run the epilogue of the previous
// 32 rows.
//
// Packed activations have the layout [row tile][column tile][16 rows][64 values]. Each row tile is
// followed by one dequantization scale per row. Values past the last column or row are zero.
#include "base/dispatch.h"
#include "matmul/epilogue_avx512.h"
#include "matmul_amx/tile_block_amx.h"
#include "per_channel/rotation_avx512.h"

namespace engine {
namespace {

static_assert(kTileBytes == kTileLoadBytes);
using Sums = TileSums<int32_t>;
constexpr int kRowsAtOnce = 2 * kTileRows;
constexpr int kEpilogueRowsPerTile = 4;  // rows of the previous block that are stored per column tile

// Sizes and offsets within a tile of 16 packed rows.
struct PackedRows {
    int tiles;

    explicit PackedRows(int columns) : tiles(div_up(columns, kTileColumns)) {}
    size_t values_bytes() const { return size_t(tiles) * kTileBytes; }
    size_t bytes() const { return values_bytes() + kTileRows * sizeof(float); }
    uint8_t* values(uint8_t* input, int row) const {
        return input + size_t(row / kTileRows) * bytes() + size_t(row % kTileRows) * kTileColumns;
    }
    const uint8_t* row_tile(const uint8_t* input, int row) const {
        return input + size_t(row / kTileRows) * bytes();
    }
    const float* row_scales(const uint8_t* input, int row) const {
        return reinterpret_cast<const float*>(row_tile(input, row) + values_bytes()) + row % kTileRows;
    }
};

size_t packed_bytes(int rows, int columns) {
    return size_t(div_up(rows, kTileRows)) * PackedRows(columns).bytes();
}

constexpr int kBufferedColumns = 4096;  // a longer row is rotated twice, so that no large buffer is needed

// Packs one row. It is rotated to find its scale, then quantized. If the row contains NaN or infinity, its
// scale is not finite, and neither is any result of the row.
void pack_row(const float* x, int columns, uint8_t* out, float* scale) {
    alignas(64) float buffer[kBufferedColumns];
    const bool is_buffered = columns <= kBufferedColumns;
    const RowScale quantized = row_scale(rotated_absmax(x, columns, is_buffered ? buffer : nullptr));
    *scale = quantized.scale;
    const __m512 inverse = _mm512_set1_ps(quantized.inverse);
    for (int k = 0; k < columns; k += kTileColumns, out += kTileBytes) {
        __m512 v[4];
        if (is_buffered)
            for (int i = 0; i < 4; i++) v[i] = _mm512_load_ps(buffer + k + 16 * i);
        else
            rotate_values(x + k, columns - k, v);
        for (int i = 0; i < 4; i++) {
            const __m512i integers = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse));
            _mm_store_si128(reinterpret_cast<__m128i*>(out) + i, _mm512_cvtsepi32_epi8(integers));
        }
    }
}

// Packs rows [begin, end). The thread that packs the last row also zeroes the padding rows of the
// last row tile.
void pack(const float* x, int stride, int columns, int rows, int begin, int end, uint8_t* input) {
    const PackedRows packed(columns);
    auto scale_of = [&](int row) { return const_cast<float*>(packed.row_scales(input, row)); };
    for (int row = begin; row < end; row++)
        pack_row(x + size_t(row) * size_t(stride), columns, packed.values(input, row), scale_of(row));
    if (end < rows) return;
    for (int row = rows; row < round_up(rows, kTileRows); row++) {
        *scale_of(row) = 0;
        for (int tile = 0; tile < packed.tiles; tile++)
            _mm512_store_si512(packed.values(input, row) + size_t(tile) * kTileBytes, _mm512_setzero_si512());
    }
}

// Multiplies all rows by panels [begin, end), in blocks of 32 rows and two panels.
class PanelMatmul {
  public:
    PanelMatmul(const MatmulJob& job, int begin, int end)
        : job_(job), packed_(job.weights->columns), begin_(begin), end_(end), panel_(begin) {
        const int times = packed_.tiles * div_up(job.rows, kRowsAtOnce);
        lines_per_tile_ = div_up(int(2 * job.weights->stride() / 64), times);
    }

    void run() {
        for (int panel = begin_; panel < end_; panel += 2) {
            next_ = job_.weights->panel(panel + 2);
            for (int row = 0; row < job_.rows; row += kRowsAtOnce) {
                if (row + kTileRows < job_.rows)
                    multiply_panels<2>(panel, row);
                else
                    multiply_panels<1>(panel, row);
            }
        }
        const Pending last = pending();
        store_rows(last, 0, kRowsAtOnce);
    }

  private:
    // A block of up to 32 rows whose accumulators wait for the epilogue.
    struct Pending {
        PairOutput output;
        const Sums& sums;
        const float* row_scales[2];  // activation scales of the rows, for both row tiles
        __m512 scales[2];            // weight scales of the channels, for both panels
        int row, rows;
    };

    Pending pending() const {
        const bool is_single = panel_ + 1 >= end_;
        const int left = job_.rows - row_;
        return {pair_output(job_, panel_, is_single),
                sums_[count_ % 2],
                {packed_.row_scales(job_.input, row_), packed_.row_scales(job_.input, row_ + kTileRows)},
                {panel_scales(panel_), panel_scales(is_single ? panel_ : panel_ + 1)},
                row_,
                count_ == 0          ? 0
                : left < kRowsAtOnce ? left
                                     : kRowsAtOnce};
    }

    __m512 panel_scales(int panel) const {
        return _mm512_load_ps(job_.weights->panel(panel) + packed_.values_bytes());
    }

    template <int kRowTiles>
    __attribute__((always_inline)) void multiply_panels(int panel, int row) {
        if (panel + 1 < end_)
            multiply<kRowTiles, 2>(panel, row);
        else
            multiply<kRowTiles, 1>(panel, row);
    }

    template <int kRowTiles, int kPanels>
    __attribute__((always_inline)) void multiply(int panel, int row) {
        const Pending previous = pending();
        const uint8_t* rows = packed_.row_tile(job_.input, row);
        const TileBlock<int32_t, kRowTiles, kPanels> tiles{
            {rows, rows + packed_.bytes()}, {job_.weights->panel(panel), job_.weights->panel(panel + 1)}};
        count_++;
        panel_ = panel;
        row_ = row;
        auto overlapped = [&](int tile) __attribute__((always_inline)) {
            if (row == 0) prefetch_panels<kPanels>(tiles.panels, tile);
            for (int line = 0; line < lines_per_tile_; line++, next_ += 64) prefetch_line<kIntoL2>(next_);
            store_rows(previous, tile * kEpilogueRowsPerTile, (tile + 1) * kEpilogueRowsPerTile);
        };
        tiles.run(packed_.tiles, sums_[count_ % 2], overlapped);
        store_rows(previous, packed_.tiles * kEpilogueRowsPerTile, kRowsAtOnce);
    }

    // Prefetches the next tiles of the current two panels into L1. The caller also prefetches the
    // next two panels into L2, a few cache lines per tile, spread evenly over the work on the
    // current two panels.
    template <int kPanels>
    __attribute__((always_inline)) void prefetch_panels(const uint8_t* const (&panels)[2], int tile) {
        constexpr int kAhead = 2;
        if (tile + kAhead >= packed_.tiles) return;
        for (int p = 0; p < kPanels; p++)
            for (int line = 0; line < kTileRows; line++)
                prefetch_line<kIntoL1>(panels[p] + size_t(tile + kAhead) * kTileBytes + 64 * line);
    }

    static constexpr int kIntoL2 = 2, kIntoL1 = 3;
    template <int kLocality>
    ENGINE_INLINE void prefetch_line(const uint8_t* line) {
        __builtin_prefetch(line, 0, kLocality);
    }

    __attribute__((always_inline)) static void store_rows(const Pending& from, int begin, int end) {
        with_store(from.output, [&](auto store) __attribute__((always_inline)) {
            for (int r = begin; r < (end < from.rows ? end : from.rows); r++) {
                const int row_tile = r / kTileRows, i = r % kTileRows;
                const __m512 scale = _mm512_set1_ps(from.row_scales[row_tile][i]);
                __m512 sums[2];
                for (int p = 0; p < 2; p++) {
                    const __m512 sum =
                        _mm512_cvtepi32_ps(_mm512_load_si512(from.sums.values[2 * row_tile + p][i]));
                    sums[p] = _mm512_mul_ps(_mm512_mul_ps(sum, scale), from.scales[p]);
                }
                store(from.row + r, sums[0], sums[1]);
            }
        });
    }

    const MatmulJob& job_;
    const PackedRows packed_;
    const int begin_, end_;
    const uint8_t* next_ = nullptr;  // next cache line to prefetch, in the next two panels
    int lines_per_tile_;             // cache lines of the next panels to prefetch per tile
    int count_ = 0;                  // number of blocks multiplied so far
    int panel_, row_ = 0;            // first panel and first row of the last block
    Sums sums_[2];
};

void matmul(const MatmulJob& job, int begin, int end, uint8_t*) {
    const int factor = job.epilogue.gated ? 2 : 1;
    TileScope tiles;
    PanelMatmul(job, begin * factor, end * factor).run();
}

}  // namespace

void fill_per_channel_amx(Kernels& table) {
    constexpr int kRows = int(Numerics::INT8_PER_CHANNEL);
    table.packed_bytes[kRows] = packed_bytes;
    table.pack[kRows] = pack;
    table.matmul[kRows] = matmul;
}

}  // namespace engine
