// Per-channel int8 GEMM with smmla, which multiplies two rows of activations by two channels. Sums are exact
// integers, so the results are those of per_channel_neon.cpp. Activations are packed as there.
#include "per_channel/per_channel_arm.h"

namespace engine {
namespace {

constexpr int kChannels = 8;  // channels that are multiplied at a time

// The first or last eight bytes of two vectors.
template <bool last>
ENGINE_INLINE int8x16_t join(int8x16_t one, int8x16_t other) {
    int64x2_t a = vreinterpretq_s64_s8(one), b = vreinterpretq_s64_s8(other);
    return vreinterpretq_s8_s64(last ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
}

// Loads eight columns of eight channels as pairs of channels.
ENGINE_INLINE void load_channels(const uint8_t* weights, int8x16_t (&pairs)[kChannels / 2]) {
    unroll<kChannels / 4>([&](auto i) ALWAYS {
        int32x4_t low = vreinterpretq_s32_u8(vld1q_u8(weights + 16 * i));
        int32x4_t high = vreinterpretq_s32_u8(vld1q_u8(weights + 16 * i + 4 * kPanelRows));
        pairs[2 * i] = vreinterpretq_s8_s32(vzip1q_s32(low, high));
        pairs[2 * i + 1] = vreinterpretq_s8_s32(vzip2q_s32(low, high));
    });
}

template <int rows>
void multiply_rows(const uint8_t* panel, const RowBlock& block, BlockSums& out) {
    constexpr int kPairs = (rows + 1) / 2, kTiles = kChannels / 2;
    for (int first = 0; first < kPanelRows; first += kChannels) {
        int32x4_t sums[kPairs][kTiles] = {};
        const uint8_t* weights = panel + 4 * first;
        const int8_t* x = block.values(0, 0);
        for (int i = 0; i < block.pieces(); i++, x += rows * kPiece)
            unroll<2>([&](auto half) ALWAYS {
                int8x16_t channels[kTiles];
                load_channels(weights, channels);
                weights += 8 * kPanelRows;
                unroll<kPairs>([&](auto p) ALWAYS {
                    constexpr int kOther = 2 * p + 1 < rows ? 2 * p + 1 : 2 * p;
                    const int8x16_t pair =
                        join<half == 1>(vld1q_s8(x + 2 * p * kPiece), vld1q_s8(x + kOther * kPiece));
                    unroll<kTiles>([&](auto c)
                                       ALWAYS { sums[p][c] = vmmlaq_s32(sums[p][c], pair, channels[c]); });
                });
            });
        unroll<kPairs * kTiles>([&](auto i) ALWAYS {
            constexpr int p = i / kTiles, c = i % kTiles;
            vst1_s32(out.values[2 * p] + first + 2 * c, vget_low_s32(sums[p][c]));
            vst1_s32(out.values[2 * p + 1] + first + 2 * c, vget_high_s32(sums[p][c]));
        });
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

void fill_per_channel_i8mm(Kernels& table) {
    fill_per_channel(table, matmul);
}

}  // namespace engine
