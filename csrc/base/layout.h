// Packed weight layouts: the form in which kernels read weight matrices. A matrix is cut into
// panels of 16 output channels. A panel is cut along the input dimension (K) into groups of 32
// values per channel.
//
// The groups of a panel are contiguous, so a GEMV reads memory sequentially. Within a group the 16
// channels are the lanes of a vector register. In the list below, a half is a 16-bit float. The
// bytes of one group in each layout are:
//
//   Q4     256 B of nibbles, 16 half scales, 16 half minima = 320 B. Byte 64 j + 4 n + c (j < 4, c < 4)
//          holds channel n: value 4 j + c in its low nibble, value 16 + 4 j + c in its high nibble.
//          weight = scale * nibble + minimum.
//   Q4G16  256 B of nibbles as in Q4, then half scales[2][16] and half minima[2][16] = 384 B. The first
//          16 of each are for values 0-15, the others for values 16-31.
//   Q8     512 B: byte 64 j + 4 n + c (j < 8) is value 4 j + c of channel n, plus 128. The half scales
//          [group][16] follow the panel's last group, padded to 64 B.  weight = scale * (byte - 128).
//   Q8M    512 B as in Q8, without the offset of 128; 16 half scales, 16 half minima = 576 B.
//   Q8G16  512 B as in Q8, then half scales[2][16] for values 0-15 and 16-31 = 576 B.
//   F16, BF16   [16 pairs][16 channels][2] = 1024 B.
//   F32    [32][16 channels] = 2048 B.
//   I8     512 B of signed bytes in the order of Q8. Two groups form a tile. 16 float scales, one per
//          channel, follow the panel's last tile.  weight = scale * byte. These weights are requantized
//          in memory from the layouts above. They are never stored in a file.
//
// Padding channels and padding columns dequantize to zero. Panels are 64-byte aligned.
#pragma once
#include "base/common.h"

namespace engine {

enum class Layout : uint8_t { Q4, Q4G16, Q8, Q8M, Q8G16, F16, BF16, F32, I8 };

constexpr int kPanelRows = 16;
constexpr int kGroup = 32;
constexpr int kTileColumns = 64;  // input columns of a tile of layout I8
constexpr size_t kTileBytes = kTileColumns * kPanelRows;

ENGINE_INLINE constexpr bool is_4_bit(Layout layout) {
    return layout == Layout::Q4 || layout == Layout::Q4G16;
}
ENGINE_INLINE constexpr bool has_minima(Layout layout) {
    return is_4_bit(layout) || layout == Layout::Q8M;
}
// Number of scales that a channel has in a group of 32 values. If it has two, the first is for
// values 0-15, the second for values 16-31.
ENGINE_INLINE constexpr int scales_per_group(Layout layout) {
    return layout == Layout::Q4G16 || layout == Layout::Q8G16 ? 2 : 1;
}

// Bytes from the start of one group to the start of the next. In Q8 and I8, scales are stored after
// the last group and do not count.
ENGINE_INLINE size_t group_bytes(Layout layout) {
    switch (layout) {
        case Layout::Q4:
            return 320;
        case Layout::Q4G16:
            return 384;
        case Layout::Q8:
        case Layout::I8:
            return 512;
        case Layout::Q8M:
        case Layout::Q8G16:
            return 576;
        case Layout::F16:
        case Layout::BF16:
            return 1024;
        default:
            return 2048;
    }
}

ENGINE_INLINE size_t panel_bytes(Layout layout, int columns) {
    if (layout == Layout::I8)
        return size_t(div_up(columns, kTileColumns)) * kTileBytes + kPanelRows * sizeof(float);
    size_t groups = div_up(columns, kGroup);
    size_t bytes = groups * group_bytes(layout);
    return layout == Layout::Q8 ? bytes + round_up_size(groups * 32, 64) : bytes;
}

// One weight matrix, or several matrices stacked along the output dimension. The object does not own `data`.
struct Matrix {
    Layout layout;
    int rows;     // output channels, without the padding channels of the last panel
    int columns;  // input dimension (K)
    const uint8_t* data;

    int panels() const { return div_up(rows, kPanelRows); }
    int groups() const { return div_up(columns, kGroup); }
    size_t stride() const { return panel_bytes(layout, columns); }
    const uint8_t* panel(int index) const { return data + size_t(index) * stride(); }
    size_t bytes() const { return size_t(panels()) * stride(); }
};

}  // namespace engine
