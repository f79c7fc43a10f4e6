// An execution plan in executable form: ops over arena buffers, with weights resolved to pointers.
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
    int source = -1;  // buffer index
    int out = -1;
    int layer = 0;

    float scale = 1;  // Embed: multiplies the embedding; Linear: multiplies the result before it is added

    // Embed: `matrix` is the embedding table. Learned position embeddings are added if `positions` is set.
    const Matrix* matrix = nullptr;
    const float* positions = nullptr;

    // Linear. AddNorm uses `norm` alone: out += norm(source).
    const Matrix* per_channel = nullptr;  // requantized copy of `matrix` for many rows; or null
    Norm norm;
    const float* bias = nullptr;
    Activation activation = Activation::None;
    bool gated = false;
    bool residual = false;
    bool multiply = false;  // out *= result
    bool over_logits = false;
    int column = 0;  // first column of `out` that is written
    int grain = 1;   // units that a thread claims at a time
    Numerics decode = Numerics::F32, prefill = Numerics::F32;

    // RopeWrite, Attention
    AttentionShape shape{};
    int rope_dim = 0;
    const float* query_norm = nullptr;
    const float* key_norm = nullptr;
    bool whole_norm = false;  // one RMS norm over all heads of a token; else one per head
    float eps = 0;

    int units() const { return gated ? div_up(matrix->rows / 2, kPanelRows) : matrix->panels(); }
};

struct Program {
    int capacity = 0;  // max tokens per step
    std::vector<Op> ops;
};

}  // namespace engine
