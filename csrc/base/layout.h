// How weights lie in memory: panels of 16 output rows, cut along the input into groups of 32 values.
//
// A panel holds its groups one after the other, so a matrix-vector product reads memory straight
// through. Inside a group the 16 rows are the lanes of a vector register:
//
//   Q4     256 B of nibbles, 16 half scales, 16 half minima = 320 B. Byte 64 j + 4 n + c (j < 4, c < 4)
//          holds row n: value 4 j + c in its low nibble, value 16 + 4 j + c in its high one.
//          weight = scale * nibble + minimum.
//   Q4G16  the same nibbles; scales[2][16] then minima[2][16] for values 0-15 and 16-31 = 384 B.
//   Q8     512 B: byte 64 j + 4 n + c (j < 8) is value 4 j + c of row n, plus 128. The half scales
//          [group][16] follow after the panel's last group, padded to 64 B.  weight = scale * (byte - 128).
//   Q8M    512 B as in Q8 but without the 128; 16 half scales, 16 half minima = 576 B.
//   Q8G16  512 B as in Q8, then scales[2][16] = 576 B.
//   F16, BF16   [16 pairs][16 rows][2] = 1024 B.
//   F32    [32][16 rows] = 2048 B.
//   I8     made from the layouts above, never stored: 512 B of signed bytes in the order of Q8, two groups to
//          a tile; after the panel's last tile 16 float scales, one for each row.  weight = scale * byte.
//
// Rows past the last and values past the last column are such that they decode to zero.
// Panels begin on 64-byte boundaries.
#pragma once
#include "base/common.h"

namespace engine {

enum class Layout : uint8_t { Q4, Q4G16, Q8, Q8M, Q8G16, F16, BF16, F32, I8 };

constexpr int kPanelRows = 16;
constexpr int kGroup = 32;
constexpr int kTileColumns = 64;  // of I8
constexpr size_t kTileBytes = kTileColumns * kPanelRows;

// Bytes from one group to the next.
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

// A weight matrix, or several stacked. Whoever made it owns the bytes.
struct Matrix {
    Layout layout;
    int rows;     // outputs; what lies past them in the last panel is zero
    int columns;  // inputs
    const uint8_t* data;

    int panels() const { return div_up(rows, kPanelRows); }
    int groups() const { return div_up(columns, kGroup); }
    size_t stride() const { return panel_bytes(layout, columns); }
    const uint8_t* panel(int index) const { return data + size_t(index) * stride(); }
    size_t bytes() const { return size_t(panels()) * stride(); }
};

}  // namespace engine
