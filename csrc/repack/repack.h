// Repacks checkpoint tensors into panels (layout.h) without a detour over floats.
//
// Quantized values keep their bits, and so do scales and minima that are stored as halves. The 256-value
// types store a half times a small integer instead; the product is rounded to a half, with a relative error
// of at most 2^-11. It can't underflow, because an integer multiple of a half is never finer than the
// smallest half. A scale or minimum that is not finite, or too large for a half, is refused.
#pragma once
#include <string>
#include <vector>

#include "base/layout.h"

namespace engine {

// Must be raised when the panel layout, or what repacking writes into it, changes: packed weight files record
// it.
constexpr int kLayoutVersion = 1;

// Values [begin, end) of a stored row, in whole blocks, for row `lane` of a cleared panel.
struct RowPiece {
    const uint8_t* data;  // the block of value `begin`
    size_t block_stride;  // bytes between blocks; a float is a block of its own
    int begin, end;
    int columns;  // of the whole row
};

// A tensor type of a checkpoint, under its GGUF name.
struct StoredType {
    const char* name;
    Layout layout;
    int block_values;
    int block_bytes;
    // Returns false if a scale or minimum is refused.
    bool (*pack)(const RowPiece& piece, uint8_t* panel, int lane);

    size_t bytes(size_t values) const { return values / size_t(block_values) * size_t(block_bytes); }
};

// Null if there is no type of that name.
const StoredType* stored_type(const std::string& name);

struct StoredPart {
    const StoredType* type;
    const uint8_t* data;
    int rows;
    const int64_t* order;  // stored row of each row; null: identity
    bool transposed;       // stored as (columns, rows); floats only
};

// A matrix to pack. Its parts are stacked along the output dimension. If interleaved, the panels of two parts
// of equal size alternate, and each part is padded to whole panels.
struct Repacking {
    Layout layout;
    int columns;
    bool interleaved;
    std::vector<StoredPart> parts;
    uint8_t* out;

    int rows() const;  // including the padding of an interleaved matrix
    int panels() const { return div_up(rows(), kPanelRows); }
    size_t bytes() const { return size_t(panels()) * panel_bytes(layout, columns); }
};

// Packs all matrices. Returns the index of one with a refused scale, or -1.
int repack(const std::vector<Repacking>& matrices, int threads);

}  // namespace engine
