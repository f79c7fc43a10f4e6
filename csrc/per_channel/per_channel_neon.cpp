// Per-channel int8 GEMM with sdot.
#include "per_channel/per_channel_arm.h"

namespace engine {
namespace {

// Adds to each lane of `sum` the dot product of four channels' bytes with word `word` of x.
template <int word>
ENGINE_INLINE void add_word(int32x4_t& sum, int8x16_t channels, int8x16_t x) {
    __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sum) : "w"(channels), "w"(x), "i"(word));
}

// Adds to sums[r] the dot products of four channels with 16 values of row r.
template <int rows>
ENGINE_INLINE void add_piece(const uint8_t* weights, const int8_t* x, int32x4_t (&sums)[rows]) {
    int8x16_t words[4], values[rows];
    unroll<4>([&](auto i) ALWAYS { words[i] = vld1q_s8(reinterpret_cast<const int8_t*>(weights) + 64 * i); });
    unroll<rows>([&](auto r) ALWAYS { values[r] = vld1q_s8(x + r * kPiece); });
    unroll<4 * rows>([&](auto i)
                         ALWAYS { add_word<i / rows>(sums[i % rows], words[i / rows], values[i % rows]); });
}

template <int rows>
void multiply_rows(const uint8_t* panel, const RowBlock& block, BlockSums& out) {
    for (int v = 0; v < kVectors; v++) {
        int32x4_t sums[rows] = {};
        const uint8_t* weights = panel + 16 * v;
        const int8_t* x = block.values(0, 0);
        for (int i = 0; i < block.pieces(); i++, weights += kPiece * kPanelRows, x += rows * kPiece)
            add_piece<rows>(weights, x, sums);
        unroll<rows>([&](auto r) ALWAYS { vst1q_s32(out.values[r] + 4 * v, sums[r]); });
    }
}

template <int... i>
const Multiply* blocks(std::integer_sequence<int, i...>) {
    static constexpr Multiply all[] = {multiply_rows<i + 1>...};
    return all;
}

void matmul(const MatmulJob& job, int begin, int end, uint8_t*) {
    multiply_units(job, begin, end, blocks(std::make_integer_sequence<int, kBlockRows>()));
}

}  // namespace

void fill_per_channel_neon(Kernels& table) {
    fill_per_channel(table, matmul);
}

}  // namespace engine
