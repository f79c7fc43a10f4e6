#include <cmath>

#include "repack/lora.h"

namespace engine {
namespace {

// The scale with which the largest value becomes 127 or -127.
float scale_of(const float* x, int count) {
    float largest = 0;
    for (int i = 0; i < count; i++) largest = std::fmax(largest, std::fabs(x[i]));
    return largest / 127;
}

// Writes bytes with an offset of 128. Byte i is at 64 * (i / 4) + i % 4.
void put_bytes(const float* x, int count, float scale, uint8_t* out) {
    const float inverse = scale > 0 ? 1 / scale : 0;
    for (int i = 0; i < count; i++) {
        const float bounded = std::fmin(std::fmax(x[i] * inverse, -127.0f), 127.0f);
        out[64 * (i / 4) + i % 4] = uint8_t(int(float_to_bits(bounded + kRoundShift) & 0xff) + 128);
    }
}

// Writes a row of A to row `lane` of a panel of layout Q8.
void put_row(const float* x, int columns, uint8_t* panel, int lane) {
    const int groups = columns / kGroup;
    uint8_t* scales = panel + size_t(groups) * group_bytes(Layout::Q8) + 2 * lane;
    for (int group = 0; group < groups; group++, x += kGroup) {
        const float scale = scale_of(x, kGroup);
        const uint16_t half = float_to_half(scale);
        put_bytes(x, kGroup, scale, panel + size_t(group) * group_bytes(Layout::Q8) + 4 * lane);
        memcpy(scales + 32 * group, &half, sizeof half);
    }
}

// Writes the row of an output channel of B.
void put_channel(const float* x, int ranks, uint8_t* panel, int lane) {
    for (int first = 0; first < ranks; first += kGroup) {
        const int count = ranks - first < kGroup ? ranks - first : kGroup, words = div_up(count, 4);
        const float scale = scale_of(x + first, count);
        put_bytes(x + first, count, scale, panel + 4 * lane);
        memcpy(panel + 64 * words + 4 * lane, &scale, sizeof scale);
        panel += 64 * (words + 1);
    }
}

}  // namespace

void pack_lora(const LoraSite& site) {
    int row = 0;
    for (const LoraPart& part : site.parts) {
        for (int rank = 0; rank < part.ranks; rank++, row++) {
            uint8_t* panel =
                site.shrinking + size_t(row / kPanelRows) * panel_bytes(Layout::Q8, site.columns);
            put_row(part.a + size_t(rank) * size_t(site.columns), site.columns, panel, row % kPanelRows);
        }
        const size_t size = size_t(expanding_bytes(part.ranks));
        for (int i = 0; i < part.rows; i++)
            put_channel(part.b + size_t(i) * size_t(part.ranks), part.ranks,
                        part.expanding + size_t(i / kPanelRows) * size, i % kPanelRows);
    }
}

}  // namespace engine
