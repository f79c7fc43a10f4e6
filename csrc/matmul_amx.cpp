// Products in bfloat16 on tiles, two panels at a time. Rows are packed as for vdpbf16ps. The panels are
// decoded to scratch beside the multiplication of the first rows, two groups ahead of it, for the tile unit
// and the vector units work at the same time; the other rows then find them there.
#include "amx.h"
#include "dequant_avx512.h"
#include "dispatch.h"
#include "epilogue_avx512.h"

namespace engine {
namespace {

constexpr int kTileRows = 16;

// Sums of two tiles of rows (0 and 1) times two panels (0 and 1): tile 2 * rows + panel.
struct alignas(64) TileSums {
    float values[4][kTileRows][kPanelRows];
};

// One group: tiles 4 and 5 hold the rows, 6 and 7 the panels.
template <int kTiles, int kPanels>
ENGINE_INLINE void multiply_group(const uint8_t* const* rows, const uint8_t* const* panels, size_t at) {
    tile_load<4>(rows[0] + at);
    tile_load<6>(panels[0] + at);
    tile_multiply_bf16<0, 4, 6>();
    if constexpr (kPanels == 2) {
        tile_load<7>(panels[1] + at);
        tile_multiply_bf16<1, 4, 7>();
    }
    if constexpr (kTiles == 2) {
        tile_load<5>(rows[1] + at);
        tile_multiply_bf16<2, 5, 6>();
    }
    if constexpr (kTiles == 2 && kPanels == 2) tile_multiply_bf16<3, 5, 7>();
}

// All groups in ascending order; `beside(group)` is run before each.
template <int kTiles, int kPanels, class Beside>
ENGINE_INLINE void multiply_groups(const uint8_t* const* rows, const uint8_t* const* panels, int groups,
                                   TileSums& sums, Beside beside) {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int g = 0; g < groups; g++) {
        beside(g);
        multiply_group<kTiles, kPanels>(rows, panels, size_t(g) * kDecodedGroupBytes);
    }
    tile_store<0>(sums.values[0]);
    if constexpr (kPanels == 2) tile_store<1>(sums.values[1]);
    if constexpr (kTiles == 2) tile_store<2>(sums.values[2]);
    if constexpr (kTiles == 2 && kPanels == 2) tile_store<3>(sums.values[3]);
}

void store_sums(const PairOutput& output, const TileSums& sums, int first_row, int rows) {
    for (int r = 0; r < rows; r++) {
        const auto* values = sums.values + r / kTileRows * 2;
        __m512 first = _mm512_load_ps(values[0][r % kTileRows]);
        __m512 second = _mm512_load_ps(values[1][r % kTileRows]);
        store_pair_row(output, first_row + r, first, second);
    }
}

// Two panels, or the last one, times all rows.
template <Layout kLayout, int kPanels>
class PanelProduct {
  public:
    PanelProduct(const MatmulJob& job, int panel, uint8_t* scratch)
        : job_(job), groups_(job.weights->groups()), output_(pair_output(job, panel, kPanels == 1)) {
        for (int p = 0; p < kPanels; p++) {
            stored_[p] = job.weights->panel(panel + p);
            decoded_[p] = scratch + size_t(p) * tile_bytes();
            panels_[p] = kLayout == Layout::BF16 ? stored_[p] : decoded_[p];
        }
    }

    void run() const {
        for (int row = 0; row < job_.rows; row += 2 * kTileRows) {
            const int left = job_.rows - row, count = left < 2 * kTileRows ? left : 2 * kTileRows;
            TileSums sums;
            if (count > kTileRows)
                multiply_rows<2>(row, sums);
            else
                multiply_rows<1>(row, sums);
            store_sums(output_, sums, row, count);
        }
    }

  private:
    size_t tile_bytes() const { return size_t(groups_) * kDecodedGroupBytes; }

    template <int kTiles>
    void multiply_rows(int row, TileSums& sums) const {
        const uint8_t* first = job_.input + size_t(row / kTileRows) * tile_bytes();
        const uint8_t* rows[2] = {first, first + tile_bytes()};
        if (row == 0) {
            decode(0);
            decode(1);
            auto ahead = [&](int group) __attribute__((always_inline)) { decode(group + 2); };
            return multiply_groups<kTiles, kPanels>(rows, panels_, groups_, sums, ahead);
        }
        auto nothing = [](int) __attribute__((always_inline)) {};
        multiply_groups<kTiles, kPanels>(rows, panels_, groups_, sums, nothing);
    }

    __attribute__((always_inline)) void decode(int group) const {
        if constexpr (kLayout != Layout::BF16) {
            if (group >= groups_) return;
            const size_t at = size_t(group) * kDecodedGroupBytes;
            for (int p = 0; p < kPanels; p++)
                decode_group<kLayout>(stored_[p], group, groups_, decoded_[p] + at);
        }
    }

    const MatmulJob& job_;
    const int groups_;
    const PairOutput output_;
    const uint8_t *stored_[2], *panels_[2];
    uint8_t* decoded_[2];
};

template <Layout kLayout>
void multiply(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    const int factor = job.epilogue.gated ? 2 : 1;
    int panel = begin * factor;
    for (; panel + 1 < end * factor; panel += 2) PanelProduct<kLayout, 2>(job, panel, scratch).run();
    if (panel < end * factor) PanelProduct<kLayout, 1>(job, panel, scratch).run();
}

void matmul(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    TileScope tiles;
    with_layout(job.weights->layout,
                [&](auto layout) { multiply<decltype(layout)::value>(job, begin, end, scratch); });
}

}  // namespace

void fill_matmul_amx(Kernels& table) {
    table.matmul[int(Numerics::BF16)] = matmul;
}

}  // namespace engine
