// From the tensors of a checkpoint to panels (layout.h), without going through floats.
//
// A quantized value keeps its bits. So do the scales and minima that are stored as halves; where a type
// has a half times a small whole number instead (the 256-value types), their product is rounded to a
// half, a relative error of at most 2^-11. It can't underflow: a whole multiple of a half is never finer
// than the smallest half. A scale or minimum that is not finite or is too large for a half is refused.
#pragma once
#include <string>
#include <vector>

#include "base/layout.h"

namespace engine {

// To be raised when panels, or what repacking writes to them, change: files of packed weights carry it.
constexpr int kLayoutVersion = 1;

// Values [begin, end) of a stored row, whole blocks, that go to row `lane` of a cleared panel.
struct RowPiece {
    const uint8_t* data;  // where value `begin` is stored
    size_t step;          // bytes from one block to the next; a float is a block of its own
    int begin, end;
    int columns;  // of the whole row
};

// A type of a checkpoint, by the name that GGUF gives it.
struct StoredType {
    const char* name;
    Layout layout;
    int block_values;
    int block_bytes;
    // False: a scale or minimum was refused.
    bool (*pack)(const RowPiece& piece, uint8_t* panel, int lane);

    size_t bytes(size_t values) const { return values / size_t(block_values) * size_t(block_bytes); }
};

// Null when there is none of that name.
const StoredType* stored_type(const std::string& name);

struct StoredPart {
    const StoredType* type;
    const uint8_t* data;
    int rows;
    const int64_t* order;  // which stored row each row is; null: the same
    bool transposed;       // stored as (columns, rows); floats only
};

// A matrix to be made. Parts follow each other row by row; or, interleaved, panels of two parts with as
// many rows each alternate, and each part is padded to whole panels.
struct Repacking {
    Layout layout;
    int columns;
    bool interleaved;
    std::vector<StoredPart> parts;
    uint8_t* out;

    int rows() const;  // an interleaved matrix counts its padding
    int panels() const { return div_up(rows(), kPanelRows); }
    size_t bytes() const { return size_t(panels()) * panel_bytes(layout, columns); }
};

// Makes all matrices. Returns the index of one that has a refused scale, or -1.
int repack(const std::vector<Repacking>& matrices, int threads);

}  // namespace engine
