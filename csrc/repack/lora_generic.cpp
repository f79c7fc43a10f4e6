#include <algorithm>
#include <cmath>

#include "repack/lora.h"

namespace engine {
namespace {

float largest(const float* x, int count) {
    float found = 0;
    for (int i = 0; i < count; i++) found = std::fmax(found, std::fabs(x[i]));
    return found;
}

// The scale with which the largest value becomes 127 or -127.
float scale_of(const float* x, int count) {
    return largest(x, count) / 127;
}

// The power of two that brings the largest value of a row of A to between 1 and 2. The column of B is divided by
// it. Otherwise the scales of a small A would be no normal f16 numbers, and one scale of B and of A x would have
// to serve ranks of very different sizes.
float size_factor(const float* x, int columns) {
    const float found = largest(x, columns);
    return found > 0 ? std::ldexp(1.0f, -std::clamp(std::ilogb(found), -60, 60)) : 1.0f;
}

// Writes bytes with an offset of 128. Byte i is at 64 * (i / 4) + i % 4.
void put_bytes(const float* x, int count, float scale, uint8_t* out) {
    const float inverse = scale > 0 ? 1 / scale : 0;
    for (int i = 0; i < count; i++) {
        const float bounded = std::fmin(std::fmax(x[i] * inverse, -127.0f), 127.0f);
        out[64 * (i / 4) + i % 4] = uint8_t(int(float_to_bits(bounded + kRoundShift) & 0xff) + 128);
    }
}

// Writes a row of A, times `factor`, to row `lane` of a panel of layout Q8.
void put_row(const float* x, int columns, float factor, uint8_t* panel, int lane) {
    const int groups = columns / kGroup;
    uint8_t* scales = panel + size_t(groups) * group_bytes(Layout::Q8) + 2 * lane;
    for (int group = 0; group < groups; group++, x += kGroup) {
        const float scale = scale_of(x, kGroup);
        const uint16_t half = float_to_half(scale * factor);
        put_bytes(x, kGroup, scale, panel + size_t(group) * group_bytes(Layout::Q8) + 4 * lane);
        memcpy(scales + 32 * group, &half, sizeof half);
    }
}

// Writes the row of an output channel of B, divided by the factor of each rank.
void put_channel(const float* x, const float* factors, int ranks, uint8_t* panel, int lane) {
    for (int first = 0; first < ranks; first += kGroup) {
        const int count = std::min(ranks - first, kGroup), words = div_up(count, 4);
        float values[kGroup];
        for (int i = 0; i < count; i++) values[i] = x[first + i] / factors[first + i];
        const float scale = scale_of(values, count);
        put_bytes(values, count, scale, panel + 4 * lane);
        memcpy(panel + 64 * words + 4 * lane, &scale, sizeof scale);
        panel += 64 * (words + 1);
    }
}

void pack_part(const LoraPart& part, int columns, int first_row, uint8_t* shrinking) {
    std::vector<float> factors;
    for (int rank = 0; rank < part.ranks; rank++) {
        const float* a = part.a + size_t(rank) * size_t(columns);
        const int row = first_row + rank;
        factors.push_back(size_factor(a, columns));
        put_row(a, columns, factors.back(),
                shrinking + size_t(row / kPanelRows) * panel_bytes(Layout::Q8, columns), row % kPanelRows);
    }
    const size_t size = size_t(expanding_bytes(part.ranks));
    for (int i = 0; i < part.rows; i++)
        put_channel(part.b + size_t(i) * size_t(part.ranks), factors.data(), part.ranks,
                    part.expanding + size_t(i / kPanelRows) * size, i % kPanelRows);
}

}  // namespace

void pack_lora(const LoraSite& site) {
    int row = 0;
    for (const LoraPart& part : site.parts) {
        pack_part(part, site.columns, row, site.shrinking);
        row += part.ranks;
    }
}

}  // namespace engine
