// `Program`: an execution plan in the form that the executor runs. Its ops read and write buffers
// of the arena, and refer to weights by pointer.
#pragma once
#include <vector>

#include "base/kernels.h"

namespace engine {

struct Norm {
    enum class Kind : uint8_t { None, Rms, Layer };
    Kind kind = Kind::None;
    const float* weight = nullptr;
    const float* bias = nullptr;
    float eps = 0;
};

struct Op {
    enum class Kind : uint8_t { Embed, Linear, RopeWrite, Attention, AddNorm, Gather };
    Kind kind = Kind::Embed;
    int source = -1;  // index of the buffer that the op reads
    int out = -1;     // index of the buffer that the op writes
    int layer = 0;

    float scale = 1;  // Embed: multiplies the embedding. Linear: multiplies the result

    // Fields of Embed. `matrix` is the embedding table; for Linear, it holds the weights.
    // `positions` are learned position embeddings, which are added; null if the model has none.
    const Matrix* matrix = nullptr;
    const float* positions = nullptr;

    // Fields of Linear. AddNorm uses `norm` and `over_logits`, and computes out += norm(source).
    const Matrix* per_channel = nullptr;  // `matrix` requantized to int8 for fast mode, or null
    Norm norm;
    const float* bias = nullptr;
    Activation activation = Activation::None;
    bool gated = false;
    bool residual = false;
    bool multiply = false;     // the result multiplies `out` instead of replacing it
    bool over_logits = false;  // the op runs only for tokens with logits
    int column = 0;            // first column of `out` that the op writes
    int grain = 1;             // number of units that a thread claims at a time
    Numerics decode = Numerics::F32, prefill = Numerics::F32;

    // Fields of RopeWrite and Attention.
    AttentionShape shape{};
    int rope_dim = 0;
    const float* query_norm = nullptr;
    const float* key_norm = nullptr;
    bool whole_norm = false;  // true: one RMS norm over all heads of a token; false: one per head
    float eps = 0;

    int units() const { return gated ? div_up(matrix->rows / 2, kPanelRows) : matrix->panels(); }
};

struct Program {
    int capacity = 0;  // max tokens per step
    std::vector<Op> ops;
};

}  // namespace engine
