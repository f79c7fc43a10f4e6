// The register-blocked core of the AMX GEMMs. It multiplies up to 32 rows of activations by up to
// two panels of weights, over all of K.
#pragma once
#include <type_traits>

#include "base/amx.h"
#include "base/layout.h"

namespace engine {
namespace {

constexpr int kTileRows = 16;
constexpr size_t kTileLoadBytes = 1024;  // size of one tile: 16 rows of 64 bytes

// The accumulators of two row tiles and two panels. values[2 * r + p] belongs to row tile r and
// panel p.
template <class Sum>
struct alignas(64) TileSums {
    Sum values[4][kTileRows][kPanelRows];
};

// One block of the GEMM. If `Sum` is float, the operands are bfloat16 tiles; if it is int32, they
// are int8 tiles. Tile registers 4 and 5 hold activations, 6 and 7 hold weights. Each register is
// reloaded right after its last use, so that one or two multiplies hide the latency of the load.
template <class Sum, int kRowTiles, int kPanels>
struct TileBlock {
    static constexpr bool kMoreRows = kRowTiles == 2, kMorePanels = kPanels == 2;
    const uint8_t* rows[2];
    const uint8_t* panels[2];

    template <int kSums, int kRows, int kPanel>
    __attribute__((always_inline)) static void multiply_tile() {
        if constexpr (std::is_same_v<Sum, float>)
            tile_multiply_bf16<kSums, kRows, kPanel>();
        else
            tile_multiply_int8<kSums, kRows, kPanel>();
    }

    __attribute__((always_inline)) void load() const {
        tile_load<4>(rows[0]);
        tile_load<6>(panels[0]);
        if constexpr (kMorePanels) tile_load<7>(panels[1]);
        if constexpr (kMoreRows) tile_load<5>(rows[1]);
    }

    // Multiplies the loaded tiles, then loads the tiles at byte offset `next`.
    __attribute__((always_inline)) void multiply_and_load(size_t next) const {
        multiply_tile<0, 4, 6>();
        if constexpr (kMorePanels) multiply_tile<1, 4, 7>();
        tile_load<4>(rows[0] + next);
        if constexpr (kMoreRows) multiply_tile<2, 5, 6>();
        tile_load<6>(panels[0] + next);
        if constexpr (kMoreRows && kMorePanels) multiply_tile<3, 5, 7>();
        if constexpr (kMorePanels) tile_load<7>(panels[1] + next);
        if constexpr (kMoreRows) tile_load<5>(rows[1] + next);
    }

    __attribute__((always_inline)) void multiply() const {
        multiply_tile<0, 4, 6>();
        if constexpr (kMorePanels) multiply_tile<1, 4, 7>();
        if constexpr (kMoreRows) multiply_tile<2, 5, 6>();
        if constexpr (kMoreRows && kMorePanels) multiply_tile<3, 5, 7>();
    }

    // Accumulates `tiles` tiles along K in ascending order. Before each tile, it calls
    // `overlapped(tile)`, which does vector work while the tile unit multiplies.
    template <class Overlapped>
    __attribute__((always_inline)) void run(int tiles, TileSums<Sum>& sums, Overlapped overlapped) const {
        tile_zero<0>();
        tile_zero<1>();
        tile_zero<2>();
        tile_zero<3>();
        load();
        for (int tile = 0; tile < tiles - 1; tile++) {
            overlapped(tile);
            multiply_and_load(size_t(tile + 1) * kTileLoadBytes);
        }
        overlapped(tiles - 1);
        multiply();
        tile_store<0>(sums.values[0]);
        if constexpr (kMorePanels) tile_store<1>(sums.values[1]);
        if constexpr (kMoreRows) tile_store<2>(sums.values[2]);
        if constexpr (kMoreRows && kMorePanels) tile_store<3>(sums.values[3]);
    }
};

}  // namespace
}  // namespace engine
