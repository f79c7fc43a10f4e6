// A plan as the executor runs it: ops over buffers of an arena, weights resolved to memory.
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
    enum class Kind : uint8_t { Embed, Linear, RopeWrite, Attention, Gather };
    Kind kind = Kind::Embed;
    int source = -1;  // buffers
    int out = -1;
    int layer = 0;

    // Embed: the table is `matrix`; learned positions are added where there are some.
    const Matrix* matrix = nullptr;
    const float* positions = nullptr;

    // Linear
    const Matrix* per_channel = nullptr;  // a copy of `matrix` for ops of many rows; null: there is none
    Norm norm;
    const float* bias = nullptr;
    Activation activation = Activation::None;
    bool gated = false;
    bool residual = false;
    bool multiply = false;  // out *= product
    bool over_logits = false;
    int column = 0;  // where in a row of `out` the product begins
    int grain = 1;   // units that a thread takes at a time
    Numerics decode = Numerics::F32, prefill = Numerics::F32;

    // RopeWrite, Attention
    AttentionShape shape{};
    int rope_dim = 0;
    const float* query_norm = nullptr;
    const float* key_norm = nullptr;
    float eps = 0;

    int units() const { return gated ? div_up(matrix->rows / 2, kPanelRows) : matrix->panels(); }
};

struct Program {
    int capacity = 0;  // tokens
    std::vector<Op> ops;
};

}  // namespace engine
