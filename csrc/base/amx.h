// AMX tile instructions. AMX has eight tile registers. Each register holds 16 rows of 64 bytes.
#pragma once
#include <immintrin.h>

#include "base/common.h"

namespace engine {
namespace {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// While an object of this class lives, the tile registers of its thread are configured. The destructor
// releases them, because a configured tile state slows down other code.
class TileScope {
  public:
    explicit TileScope(const TileConfig& config = TileConfig()) {
        __asm__ volatile("ldtilecfg %0" ::"m"(config));
    }
    ~TileScope() { __asm__ volatile("tilerelease" ::: "memory"); }
    TileScope(const TileScope&) = delete;
};

// The tile operations below are inline assembly. The compiler's intrinsics do not declare the
// memory that they read, and they do not accept the tile number as a template constant.
template <int kTile>
ENGINE_INLINE void tile_zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// Loads 16 rows of 64 bytes into a tile register. The rows are `stride` bytes apart in memory.
template <int kTile>
ENGINE_INLINE void tile_load(const void* from, size_t stride = 64) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
ENGINE_INLINE void tile_store(void* to, size_t stride = 64) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}

// Multiplies a tile of bfloat16 rows by a tile of bfloat16 pairs and adds the products to a tile of
// floats. For all k: sums[m][n] += rows[m][2 k] * pairs[k][n][0] + rows[m][2 k + 1] *
// pairs[k][n][1].
template <int kSums, int kRows, int kPairs>
ENGINE_INLINE void tile_multiply_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kPairs), "i"(kRows), "i"(kSums));
}

// Multiplies a tile of signed int8 rows by a tile of int8 quadruples and adds the products to a
// tile of int32. For all k and i < 4: sums[m][n] += rows[m][4 k + i] * fours[k][n][i].
template <int kSums, int kRows, int kFours>
ENGINE_INLINE void tile_multiply_int8() {
    __asm__ volatile("tdpbssd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kFours), "i"(kRows), "i"(kSums));
}

// The same for signed rows and unsigned quadruples.
template <int kSums, int kRows, int kFours>
ENGINE_INLINE void tile_multiply_mixed() {
    __asm__ volatile("tdpbsud %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kFours), "i"(kRows), "i"(kSums));
}

}  // namespace
}  // namespace engine
