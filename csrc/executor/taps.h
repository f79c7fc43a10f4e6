// Taps: what requests read and change inside a step, for interpretability. A tap is a row of data: a site,
// a token, and what happens there. Steps without taps run the plain program.
#pragma once
#include "base/common.h"

namespace engine {

// A place in a program where taps can be. All programs of a model have the same ops, so `op` is valid in all.
struct TapSite {
    enum class Point : uint8_t {
        Before,        // the input of the op
        After,         // the output of the op
        Result,        // the op's result before it is added to `out`, or an embedding without positions
        Normed,        // the op's input after its norm
        PreActivation  // the op's result before its activation
    };
    int op;
    Point point;
    int column;  // first column of the buffer
    int width;
};

enum class TapKind : int32_t { Capture, Add, Scale, Set, ProjectOut, Clamp };

// The taps of a step, sorted by site and then by token. The arrays belong to the caller.
struct TapArrays {
    int count = 0;
    const int32_t* sites = nullptr;
    const int32_t* tokens = nullptr;
    const int32_t* kinds = nullptr;
    // Capture: the row of `captured` to write. Otherwise: the row of `vectors` to read. Clamp reads the
    // encoder's vector in this row, and the decoder's in the next.
    const int32_t* rows = nullptr;
    const float* scales = nullptr;
    const float* vectors = nullptr;  // the last two columns are only for Clamp: the bias and the threshold
    int num_vectors = 0, vector_width = 0;
    float* captured = nullptr;
    int num_captured = 0, captured_width = 0;

    // Applies tap `index` to a row of activations.
    void apply(int index, float* x, int width) const;
};

}  // namespace engine
