// BF16 GEMM with AMX tiles. It computes two panels at a time. Activations are packed as for vdpbf16ps
// (matmul_avx512bf16.cpp).
//
// The tile unit and the vector units of a core run in parallel, so vector work is interleaved with
// the tile multiplies of each group. During the first block of 32 rows, the vector units dequantize
// the weights two groups ahead. During each later block, they run the epilogue of the block before
// it.
#include "base/dispatch.h"
#include "matmul/dequantize_avx512.h"
#include "matmul/epilogue_avx512.h"
#include "matmul_amx/tile_block_amx.h"

namespace engine {
namespace {

static_assert(kBf16GroupBytes == kTileLoadBytes);
constexpr int kBlockRows = 2 * kTileRows;
using Sums = TileSums<float>;
constexpr int kEpilogueRowsPerGroup = 2;  // rows of the previous block that are stored per group

// Multiplies all rows of activations by two panels, or by the last panel alone.
template <Layout kLayout, int kPanels>
class PanelMatmul {
  public:
    PanelMatmul(const MatmulJob& job, int panel, uint8_t* scratch)
        : job_(job), groups_(job.weights->groups()), output_(pair_output(job, panel, kPanels == 1)) {
        for (int p = 0; p < kPanels; p++) {
            stored_[p] = job.weights->panel(panel + p);
            dequantized_[p] = scratch + size_t(p) * tile_bytes();
            panels_[p] = kLayout == Layout::BF16 ? stored_[p] : dequantized_[p];
        }
    }

    void run() const {
        Sums sums[2];
        const int blocks = div_up(job_.rows, kBlockRows);
        for (int block = 0; block < blocks; block++) {
            Sums &current = sums[block % 2], &previous = sums[(block + 1) % 2];
            if (job_.rows - block * kBlockRows > kTileRows)
                multiply_block<2>(block, current, previous);
            else
                multiply_block<1>(block, current, previous);
        }
        store_rows(blocks - 1, sums[(blocks - 1) % 2], 0, kBlockRows);
    }

  private:
    size_t tile_bytes() const { return size_t(groups_) * kBf16GroupBytes; }

    template <int kRowTiles>
    __attribute__((always_inline)) void multiply_block(int block, Sums& current, const Sums& previous) const {
        const uint8_t* first = job_.input + size_t(block) * 2 * tile_bytes();
        const TileBlock<float, kRowTiles, kPanels> tiles{{first, first + tile_bytes()},
                                                         {panels_[0], panels_[1]}};
        if (block == 0) {
            dequantize(0);
            dequantize(1);
            auto ahead = [&](int group) __attribute__((always_inline)) { dequantize(group + 2); };
            return tiles.run(groups_, current, ahead);
        }
        auto previous_block = [&](int group) __attribute__((always_inline)) {
            store_rows(block - 1, previous, group * kEpilogueRowsPerGroup,
                       (group + 1) * kEpilogueRowsPerGroup);
        };
        tiles.run(groups_, current, previous_block);
        store_rows(block - 1, previous, groups_ * kEpilogueRowsPerGroup, kBlockRows);
    }

    __attribute__((always_inline)) void dequantize(int group) const {
        if constexpr (kLayout != Layout::BF16) {
            if (group >= groups_) return;
            const size_t at = size_t(group) * kBf16GroupBytes;
            for (int p = 0; p < kPanels; p++)
                dequantize_group<kLayout>(stored_[p], group, groups_, dequantized_[p] + at);
        }
    }

    // Runs the epilogue for rows [begin, end) of a block. Padding rows of the last block are
    // skipped.
    __attribute__((always_inline)) void store_rows(int block, const Sums& sums, int begin, int end) const {
        const int first = block * kBlockRows, left = job_.rows - first;
        const int last = left < kBlockRows ? left : kBlockRows;
        with_store(output_, [&](auto store) __attribute__((always_inline)) {
            for (int r = begin; r < (end < last ? end : last); r++) {
                const auto* values = sums.values + r / kTileRows * 2;
                __m512 one = _mm512_load_ps(values[0][r % kTileRows]);
                __m512 two = _mm512_load_ps(values[1][r % kTileRows]);
                store(first + r, one, two);
            }
        });
    }

    const MatmulJob& job_;
    const int groups_;
    const PairOutput output_;
    const uint8_t *stored_[2], *panels_[2];
    uint8_t* dequantized_[2];
};

template <Layout kLayout>
void multiply(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    const int factor = job.epilogue.gated ? 2 : 1;
    int panel = begin * factor;
    for (; panel + 1 < end * factor; panel += 2) PanelMatmul<kLayout, 2>(job, panel, scratch).run();
    if (panel < end * factor) PanelMatmul<kLayout, 1>(job, panel, scratch).run();
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
