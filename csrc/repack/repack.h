// Repacks the tensors of a checkpoint into panels (layout.h), the form that kernels read. Quantized
// tensors stay quantized.
//
// Quantized values keep their bits, and so do scales and minima that the checkpoint stores as
// halves. Types with blocks of 256 values store each scale as a half times a small integer. This
// product is rounded to a half, with a relative error of at most 2^-11. It cannot underflow,
// because an integer multiple of a half is never finer than the smallest half. A matrix is refused
// if one of its scales or minima is not finite or too large for a half.
#pragma once
#include <string>
#include <vector>

#include "base/layout.h"

namespace engine {

// Version of the panel layout. Files of packed weights record it. It must be raised when the layout
// changes, or when repacking writes other values than before.
constexpr int kLayoutVersion = 1;

// Values [begin, end) of a stored row, in whole blocks. `StoredType::pack` writes them to one row
// of a cleared panel.
struct RowPiece {
    const uint8_t* data;  // address of the block that holds value `begin`
    size_t block_stride;  // bytes from one block to the next; each float of a float type is a block
    int begin, end;
    int columns;  // number of values of the whole row
};

// A tensor type. `name` is its name in `weights/quants.py`. Types that are not listed are first written as one
// of these.
struct StoredType {
    const char* name;
    Layout layout;
    int block_values;  // values per block; 1 for float types
    int block_bytes;   // bytes per block
    // Packs a piece of a row into row `lane` of a panel. Returns false if a scale or minimum is not
    // finite or too large.
    bool (*pack)(const RowPiece& piece, uint8_t* panel, int lane);

    size_t bytes(size_t values) const { return values / size_t(block_values) * size_t(block_bytes); }
};

// Returns the type with this name, or null if there is none.
const StoredType* stored_type(const std::string& name);

struct StoredPart {
    const StoredType* type;
    const uint8_t* data;
    int rows;
    const int64_t* order;  // order[i]: the stored row that becomes row i; null: rows keep their order
    bool transposed;       // true: stored as (columns, rows), which only float types can be
};

// A matrix to pack. Its parts are stored tensors, stacked along the output dimension. If
// `interleaved`, there are two parts of equal size, such as gate and up. Their panels alternate,
// and each part is padded to whole panels.
struct Repacking {
    Layout layout;
    int columns;
    bool interleaved;
    std::vector<StoredPart> parts;
    uint8_t* out;

    int rows() const;  // including the padding rows of an interleaved matrix
    int panels() const { return div_up(rows(), kPanelRows); }
    size_t bytes() const { return size_t(panels()) * panel_bytes(layout, columns); }
};

// Packs all matrices. Returns -1, or the index of a matrix with a scale or minimum that is not
// finite or too large for a half.
int repack(const std::vector<Repacking>& matrices, int threads);

}  // namespace engine
