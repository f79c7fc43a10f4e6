// Repacks checkpoint tensors into panels (layout.h). Quantized tensors are not dequantized on the way.
//
// Quantized values keep their bits. Scales and minima that are stored as halves keep their bits too. Types
// with blocks of 256 values store each scale as a half times a small integer. This product is rounded to a
// half, with a relative error of at most 2^-11. It cannot underflow, because an integer multiple of a half is
// never finer than the smallest half. A scale or minimum that is not finite, or too large for a half, is
// refused.
#pragma once
#include <string>
#include <vector>

#include "base/layout.h"

namespace engine {

// Version of the panel layout, which packed weight files record. It must be raised when the layout changes or
// when repacking writes other values.
constexpr int kLayoutVersion = 1;

// Values [begin, end) of a stored row, in whole blocks. They are packed into row `lane` of a cleared panel.
struct RowPiece {
    const uint8_t* data;  // address of the block that holds value `begin`
    size_t block_stride;  // bytes from one block to the next; a float counts as a block
    int begin, end;
    int columns;  // columns of the whole row
};

// A tensor type of a checkpoint. `name` is its GGUF name.
struct StoredType {
    const char* name;
    Layout layout;
    int block_values;
    int block_bytes;
    // Packs a piece of a row. Returns false if a scale or minimum is refused.
    bool (*pack)(const RowPiece& piece, uint8_t* panel, int lane);

    size_t bytes(size_t values) const { return values / size_t(block_values) * size_t(block_bytes); }
};

// Returns the type with this name, or null if there is none.
const StoredType* stored_type(const std::string& name);

struct StoredPart {
    const StoredType* type;
    const uint8_t* data;
    int rows;
    const int64_t* order;  // order[i]: stored row that becomes row i; null: the stored order
    bool transposed;       // stored as (columns, rows); only floats can be
};

// A matrix to pack. Its parts are stacked along the output dimension. If `interleaved`, it has two parts of
// equal size whose panels alternate, and each part is padded to whole panels.
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

// Packs all matrices. Returns the index of a matrix with a refused scale or minimum, or -1.
int repack(const std::vector<Repacking>& matrices, int threads);

}  // namespace engine
