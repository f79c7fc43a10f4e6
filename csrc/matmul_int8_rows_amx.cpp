// INT8_ROWS products on tiles: weights go from memory to the tile unit as they lie, two panels at a time.
//
// A row is its scale times (high + low / 254), high and low whole numbers from -127 to 127, so 16 rows are two
// tiles for each 64 columns. Sums of whole rows are whole numbers, so that the order of work is free; what
// only vectors can do, finishing 16 rows, is done beside the next multiplication, a little with each tile.
//
// Packed rows: [16 rows][high, low][tile][16 rows][64 values], then 16 float scales; zero past the last column
// and row.
#include "amx.h"
#include "dispatch.h"
#include "epilogue_avx512.h"

namespace engine {
namespace {

constexpr int kTileRows = 16;
constexpr int kFinishedBeside = 2;  // rows, with each tile of columns
constexpr float kLowSteps = 254.0f;

// What 16 packed rows take, and where the parts of it are.
struct PackedRows {
    int tiles;

    explicit PackedRows(int columns) : tiles(div_up(columns, kTileColumns)) {}
    size_t term_bytes() const { return size_t(tiles) * kTileBytes; }
    size_t bytes() const { return 2 * term_bytes() + kTileRows * sizeof(float); }
    const float* scales(const uint8_t* rows) const {
        return reinterpret_cast<const float*>(rows + 2 * term_bytes());
    }
};

size_t packed_bytes(int rows, int columns) {
    return size_t(div_up(rows, kTileRows)) * PackedRows(columns).bytes();
}

// The largest size among a row's values; NaN is above all.
float peak_of(const float* x, int columns) {
    __m512i peak = _mm512_setzero_si512();
    for (int k = 0; k < columns; k += 16) {
        const int left = columns - k;
        const __mmask16 lanes = left < 16 ? __mmask16((1 << left) - 1) : __mmask16(0xffff);
        const __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(lanes, x + k));
        peak = _mm512_max_epi32(peak, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    return bits_to_float(uint32_t(_mm512_reduce_max_epi32(peak)));
}

// What is not finite makes the scale so, and with it all that is computed from the row.
void pack_row(const float* x, int columns, const PackedRows& packed, uint8_t* high, float* scale) {
    const float peak = peak_of(x, columns);
    const bool is_zero = peak < 1e-30f;
    const __m512 inverse = _mm512_set1_ps(is_zero ? 0.0f : 127.0f / peak);
    *scale = is_zero ? 0.0f : peak / (127.0f * kLowSteps);
    uint8_t* low = high + packed.term_bytes();
    for (int k = 0; k < packed.tiles * kTileColumns; k += 16) {
        const int left = columns - k;
        const __mmask16 lanes = left >= 16  ? __mmask16(0xffff)
                                : left <= 0 ? __mmask16(0)
                                            : __mmask16((1 << left) - 1);
        const __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, x + k), inverse);
        const __m512i whole = _mm512_cvtps_epi32(value);
        const __m512 rest = _mm512_sub_ps(value, _mm512_cvtepi32_ps(whole));
        const __m512i steps = _mm512_cvtps_epi32(_mm512_mul_ps(rest, _mm512_set1_ps(kLowSteps)));
        const size_t at = size_t(k / kTileColumns) * kTileBytes + size_t(k % kTileColumns);
        _mm_store_si128(reinterpret_cast<__m128i*>(high + at), _mm512_cvtsepi32_epi8(whole));
        _mm_store_si128(reinterpret_cast<__m128i*>(low + at), _mm512_cvtsepi32_epi8(steps));
    }
}

// Whoever packs the last row clears what is missing of its tile.
void pack(const float* x, int stride, int columns, int rows, int begin, int end, uint8_t* input) {
    const PackedRows packed(columns);
    auto row_of = [&](int row, float*& scale) {
        uint8_t* sixteen = input + size_t(row / kTileRows) * packed.bytes();
        scale = reinterpret_cast<float*>(sixteen + 2 * packed.term_bytes()) + row % kTileRows;
        return sixteen + size_t(row % kTileRows) * kTileColumns;
    };
    float* scale;
    for (int row = begin; row < end; row++) {
        uint8_t* high = row_of(row, scale);
        pack_row(x + size_t(row) * size_t(stride), columns, packed, high, scale);
    }
    if (end < rows) return;
    for (int row = rows; row < round_up(rows, kTileRows); row++) {
        uint8_t* high = row_of(row, scale);
        *scale = 0;
        for (int tile = 0; tile < 2 * packed.tiles; tile++)
            _mm512_store_si512(high + size_t(tile) * kTileBytes, _mm512_setzero_si512());
    }
}

// Sums of 16 rows, high (0) and low (1), times two panels (0 and 1): tile 2 * term + panel.
struct alignas(64) TileSums {
    int32_t values[4][kTileRows][kPanelRows];
};

// Tiles 4 and 5 hold the two terms of the rows, 6 and 7 the panels. Each is loaded again right after its last
// use, which leaves the time of a multiplication or two before the next.
template <int kPanels>
struct TileBlock {
    const uint8_t* rows[2];
    const uint8_t* panels[2];

    __attribute__((always_inline)) void load() const {
        tile_load<4>(rows[0]);
        tile_load<6>(panels[0]);
        if constexpr (kPanels == 2) tile_load<7>(panels[1]);
        tile_load<5>(rows[1]);
    }

    // Multiplies what is loaded, and loads what lies `next` bytes on.
    __attribute__((always_inline)) void multiply_and_load(size_t next) const {
        tile_multiply_int8<0, 4, 6>();
        if constexpr (kPanels == 2) tile_multiply_int8<1, 4, 7>();
        tile_load<4>(rows[0] + next);
        tile_multiply_int8<2, 5, 6>();
        tile_load<6>(panels[0] + next);
        if constexpr (kPanels == 2) tile_multiply_int8<3, 5, 7>();
        if constexpr (kPanels == 2) tile_load<7>(panels[1] + next);
        tile_load<5>(rows[1] + next);
    }

    __attribute__((always_inline)) void multiply() const {
        tile_multiply_int8<0, 4, 6>();
        if constexpr (kPanels == 2) tile_multiply_int8<1, 4, 7>();
        tile_multiply_int8<2, 5, 6>();
        if constexpr (kPanels == 2) tile_multiply_int8<3, 5, 7>();
    }

    // `beside(tile)` is run before the multiplication of each tile.
    template <class Beside>
    __attribute__((always_inline)) void run(int tiles, TileSums& sums, Beside beside) const {
        tile_zero<0>();
        tile_zero<1>();
        tile_zero<2>();
        tile_zero<3>();
        load();
        for (int tile = 0; tile < tiles - 1; tile++) {
            beside(tile);
            multiply_and_load(size_t(tile + 1) * kTileBytes);
        }
        beside(tiles - 1);
        multiply();
        tile_store<0>(sums.values[0]);
        if constexpr (kPanels == 2) tile_store<1>(sums.values[1]);
        tile_store<2>(sums.values[2]);
        if constexpr (kPanels == 2) tile_store<3>(sums.values[3]);
    }
};

// Panels [begin, end) times all rows, 16 by 16.
class Product {
  public:
    Product(const MatmulJob& job, int begin, int end)
        : job_(job), packed_(job.weights->columns), begin_(begin), end_(end), panel_(begin) {
        const int times = packed_.tiles * div_up(job.rows, kTileRows);
        share_ = div_up(int(2 * job.weights->stride() / 64), times);
    }

    void run() {
        for (int panel = begin_; panel < end_; panel += 2) {
            next_ = job_.weights->panel(panel + 2);
            for (int row = 0; row < job_.rows; row += kTileRows) {
                if (panel + 1 < end_)
                    multiply<2>(panel, row);
                else
                    multiply<1>(panel, row);
            }
        }
        const Pending last = pending();
        finish(last, 0, kTileRows);
    }

  private:
    // 16 rows, or fewer, whose sums are there.
    struct Pending {
        PairOutput output;
        const TileSums& sums;
        const float* row_scales;
        __m512 scales[2];  // of the panels
        int row, rows;
    };

    Pending pending() const {
        const bool is_single = panel_ + 1 >= end_;
        const int left = job_.rows - row_;
        const uint8_t* rows = job_.input + size_t(row_ / kTileRows) * packed_.bytes();
        return {pair_output(job_, panel_, is_single),
                sums_[count_ % 2],
                packed_.scales(rows),
                {panel_scales(panel_), panel_scales(is_single ? panel_ : panel_ + 1)},
                row_,
                count_ == 0        ? 0
                : left < kTileRows ? left
                                   : kTileRows};
    }

    __m512 panel_scales(int panel) const {
        return _mm512_load_ps(job_.weights->panel(panel) + packed_.term_bytes());
    }

    template <int kPanels>
    __attribute__((always_inline)) void multiply(int panel, int row) {
        const Pending before = pending();
        const uint8_t* rows = job_.input + size_t(row / kTileRows) * packed_.bytes();
        const TileBlock<kPanels> tiles{{rows, rows + packed_.term_bytes()},
                                       {job_.weights->panel(panel), job_.weights->panel(panel + 1)}};
        count_++;
        panel_ = panel;
        row_ = row;
        auto beside = [&](int tile) __attribute__((always_inline)) {
            prefetch<kPanels>(tiles, row, tile);
            finish(before, tile * kFinishedBeside, (tile + 1) * kFinishedBeside);
        };
        tiles.run(packed_.tiles, sums_[count_ % 2], beside);
        finish(before, packed_.tiles * kFinishedBeside, kTileRows);
    }

    // Asks for what comes soon in the two panels, and for a share of the next two: their lines are spread over
    // the work on these, which is longer the more rows there are.
    template <int kPanels>
    __attribute__((always_inline)) void prefetch(const TileBlock<kPanels>& tiles, int row, int tile) {
        constexpr int kAhead = 2;
        if (row == 0 && tile + kAhead < packed_.tiles)
            for (int p = 0; p < kPanels; p++)
                for (int line = 0; line < kTileRows; line++)
                    ask<_MM_HINT_T0>(tiles.panels[p] + size_t(tile + kAhead) * kTileBytes + 64 * line);
        for (int line = 0; line < share_; line++, next_ += 64) ask<_MM_HINT_T1>(next_);
    }

    template <_mm_hint kHint>
    ENGINE_INLINE void ask(const uint8_t* line) {
        _mm_prefetch(reinterpret_cast<const char*>(line), kHint);
    }

    __attribute__((always_inline)) static void finish(const Pending& from, int begin, int end) {
        for (int r = begin; r < (end < from.rows ? end : from.rows); r++) {
            const __m512 scale = _mm512_set1_ps(from.row_scales[r]);
            __m512 sums[2];
            for (int p = 0; p < 2; p++) {
                const __m512 high = _mm512_cvtepi32_ps(_mm512_load_si512(from.sums.values[p][r]));
                const __m512 low = _mm512_cvtepi32_ps(_mm512_load_si512(from.sums.values[2 + p][r]));
                const __m512 sum = _mm512_fmadd_ps(high, _mm512_set1_ps(kLowSteps), low);
                sums[p] = _mm512_mul_ps(_mm512_mul_ps(sum, scale), from.scales[p]);
            }
            store_pair_row(from.output, from.row + r, sums[0], sums[1]);
        }
    }

    const MatmulJob& job_;
    const PackedRows packed_;
    const int begin_, end_;
    const uint8_t* next_ = nullptr;  // what of the next two panels is to be asked for
    int share_;                      // lines of them with each tile
    int count_ = 0;                  // 16 rows times two panels, so often
    int panel_, row_ = 0;            // of the last time
    TileSums sums_[2];
};

void matmul(const MatmulJob& job, int begin, int end, uint8_t*) {
    const int factor = job.epilogue.gated ? 2 : 1;
    TileScope tiles;
    Product(job, begin * factor, end * factor).run();
}

}  // namespace

void fill_matmul_int8_rows_amx(Kernels& table) {
    constexpr int kRows = int(Numerics::INT8_ROWS);
    table.packed_bytes[kRows] = packed_bytes;
    table.pack[kRows] = pack;
    table.matmul[kRows] = matmul;
}

}  // namespace engine
