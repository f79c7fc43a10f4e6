// Layers that keep a state for each sequence: short convolutions, Mamba-2 and Gated DeltaNet.
//
// A layer reads the result of its input projection, token by token in the order of positions. Its columns
// are, by mixer:
//   Conv    B, C, x                        out = C * conv(B * x)
//   Mamba2  gate, [x, B, C], dt            out = norm(scan * silu(gate))
//   Delta   [q, k, v], gate, beta, alpha   out = norm(scan) * silu(gate)
// The columns in brackets go through a convolution and silu first, in place. The state of a layer begins
// with the last inputs of the convolution, (window - 1, channels). For each head, a matrix (state_size,
// head_dim) follows.
#pragma once
#include "base/common.h"

namespace engine {

struct RecurrentShape {
    enum class Mixer : uint8_t { Conv, Mamba2, Delta };
    Mixer mixer = Mixer::Conv;
    int channels = 0, window = 0;  // of the convolution; the window includes the current token
    int heads = 0, head_dim = 0, groups = 1, state_size = 0, norm_groups = 1;
    float eps = 0;
    size_t state_offset = 0;  // floats before the layer's state in the state of a sequence

    int inner() const { return heads * head_dim; }
    int shared() const { return groups * state_size; }
    // Floats from the beginning of the layer's state to the matrix of a head.
    size_t matrix_offset(int head) const {
        return size_t(window - 1) * size_t(channels) +
               size_t(head) * size_t(state_size) * size_t(head_dim);
    }
};

struct RecurrentWeights {
    const float* conv = nullptr;       // (window, channels)
    const float* conv_bias = nullptr;  // (channels) or null
    const float* dt_bias = nullptr;    // (heads)
    const float* decay = nullptr;      // (heads) negative
    const float* skip = nullptr;       // (heads) only Mamba2
    const float* norm = nullptr;       // Mamba2: (inner); Delta: (head_dim)
};

// The tokens of one sequence in a step.
struct RecurrentRow {
    const int32_t* tokens;  // indices into the rows of `source` and `out`, in the order of positions
    int count;
    bool is_new;   // the first token is at position 0, so the state is zeroed first
    float* state;  // of the layer
};

struct RecurrentJob {
    const RecurrentShape* shape;
    const RecurrentWeights* weights;
    float* source;
    int source_stride;
    float* out;
    int out_stride;

    float* input(int token) const { return source + size_t(token) * size_t(source_stride); }
    float* result(int token) const { return out + size_t(token) * size_t(out_stride); }
};

}  // namespace engine
