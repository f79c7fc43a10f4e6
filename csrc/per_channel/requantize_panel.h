// Requantizes weight panels of any other layout to layout I8: Hadamard-rotated int8 values with one
// scale per output channel.
#pragma once
#include "base/with_layout.h"
#include "matmul/dequantize.h"
#include "per_channel/hadamard.h"

namespace engine {
namespace {

// The scales of channels [n, n + kLanes), and their inverses. A channel's values times its inverse
// are in [-127, 127].
struct ChannelScale {
    Floats scale, inverse;
};

ChannelScale channel_scale(const float* values, int columns, int n) {
    Floats absmax = {};
    for (int k = 0; k < columns; k++) {
        Floats size = (Floats)((Ints)load(values + k * kPanelRows + n) & 0x7fffffff);
        absmax = size > absmax ? size : absmax;
    }
    return {absmax / 127.0f, absmax > 1e-30f ? 127.0f / absmax : Floats{}};
}

// Quantizes four values of each of kLanes channels. The four bytes of a channel form one 32-bit
// word of the result.
ENGINE_INLINE Ints quantize_four(const float* values, Floats inverse) {
    Ints four = {};
    for (int c = 0; c < 4; c++) {
        Floats shifted = load(values + c * kPanelRows) * inverse + kRoundShift;
        four |= ((Ints)shifted & 255) << 8 * c;
    }
    return four;
}

void quantize_channels(const float* values, int columns, uint8_t* out) {
    const int tiles = div_up(columns, kTileColumns);
    float* scales = reinterpret_cast<float*>(out + size_t(tiles) * kTileBytes);
    for (int n = 0; n < kPanelRows; n += kLanes) {
        const ChannelScale channel = channel_scale(values, columns, n);
        store(scales + n, channel.scale);
        for (int four = 0; four < tiles * kTileColumns / 4; four++) {
            Ints bytes = quantize_four(values + four * 4 * kPanelRows + n, channel.inverse);
            memcpy(out + (four * kPanelRows + n) * 4, &bytes, sizeof bytes);
        }
    }
}

void requantize_panel(const Matrix& from, int panel, float* values, uint8_t* out) {
    const int groups = from.groups(), padded = round_up(from.columns, kTileColumns);
    with_layout(from.layout, [&](auto layout) {
        for (int g = 0; g < groups; g++)
            dequantize_group<layout>(from.panel(panel), groups, g, values + g * kGroup * kPanelRows);
    });
    memset(values + from.columns * kPanelRows, 0, size_t(padded - from.columns) * kPanelRows * sizeof(float));
    rotate_columns(values, padded);
    quantize_channels(values, padded, out);
}

}  // namespace
}  // namespace engine
