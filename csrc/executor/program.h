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

// How a router chooses the experts of a token. See ExpertsConfig in architectures/base.py.
struct Routing {
    enum class Scoring : uint8_t { Softmax, SoftmaxChosen, Sigmoid };
    Scoring scoring = Scoring::Softmax;
    int per_token = 1;
    bool renormalizes = false;
    float scale = 1;
    int groups = 1, groups_per_token = 1;
    bool best_two = false;              // a group is ranked by the sum of its best two experts
    const float* correction = nullptr;  // (experts) added to the scores that choose experts; or null
};

// The matrices of all experts of a layer. They have the same shape and lie one after the other.
struct ExpertMatrices {
    Matrix first{};               // the matrix of expert 0
    size_t stride = 0;            // bytes from one matrix to the next
    const float* bias = nullptr;  // one vector per expert, padded to whole panels; or null
    int bias_stride = 0;
    Numerics decode = Numerics::F32, prefill = Numerics::F32;

    Matrix matrix(int expert) const {
        Matrix matrix = first;
        matrix.data += size_t(expert) * stride;
        return matrix;
    }
    const float* bias_of(int expert) const {
        return bias ? bias + size_t(expert) * size_t(bias_stride) : nullptr;
    }
    Numerics numerics(bool is_prefill) const { return is_prefill ? prefill : decode; }
};

struct Op {
    enum class Kind : uint8_t {
        Embed,
        Linear,
        RopeWrite,
        LatentWrite,
        HeadLinear,
        Attention,
        Norm,
        Gather,
        Mean,
        Route,
        Experts,
        GateRows,
        Recurrent,
        Tap,
        AddRows,
        AddPositions
    };
    Kind kind = Kind::Embed;
    int source = -1;  // index of the buffer that the op reads
    int out = -1;     // index of the buffer that the op writes
    int layer = 0;

    // Embed: multiplies the embedding. Linear and Experts: multiplies the result.
    float scale = 1;
    float softcap = 0;  // Linear: results become softcap * tanh(result / softcap); 0: no cap

    // Fields of Embed. `matrix` is the embedding table; for Linear, it holds the weights.
    // `positions` are learned position embeddings, which are added; null if the model has none. `types` are
    // those of token types.
    const Matrix* matrix = nullptr;
    const float* positions = nullptr;
    const float* types = nullptr;
    int num_types = 0;

    // Fields of Linear. Norm uses `norm`, `residual` and `over_logits`, and computes out = norm(source), or
    // out += norm(source).
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
    int site = -1;             // index of the op's matrices in LoRA adapters; -1: adapters can't change it
    Numerics decode = Numerics::F32, prefill = Numerics::F32;

    // Fields of RopeWrite and Attention. LatentWrite uses `key_norm`, `eps` and those of RoPE. It normalizes
    // the first values of each row, which are the latent, and rotates the other `rope_dim` values, the key.
    AttentionShape shape{};
    int cache = 0;     // which KV cache of the executor; `layer` counts the layers of this cache
    int schedule = 0;  // index of the attention schedule for the op's window
    int rope = 0;      // index of the RoPE table
    int rope_dim = 0;
    const float* query_norm = nullptr;
    const float* key_norm = nullptr;
    bool whole_norm = false;  // true: one RMS norm over all heads of a token; false: one per head
    float eps = 0;

    // Fields of Route: `out` gets the weight of each expert for each token. Experts reads the weights from
    // buffer `weights` and adds to `out` if `residual`. `up` is gated. GateRows multiplies `out` by
    // sigmoid(source), which has one value per row or as many as `out`.
    int num_experts = 0;
    int weights = -1;
    Routing routing;
    ExpertMatrices up, down;

    // Fields of Recurrent, which overwrites `source`.
    RecurrentShape recurrence;
    RecurrentWeights recurrent_weights;
    // HeadLinear multiplies head h of each row by matrix h of `by_head`. The last `rope_dim` values of a head
    // are rotated instead and follow the results of the head. `num_experts` is the number of heads.
    ExpertMatrices by_head;
    // Tap, AddRows and AddPositions are only in programs with taps (taps.h). Tap changes `out`; its groups are
    // the `num_experts` ones from `layer` on. If `source` is set, it has values before the activation that made
    // `out`. AddRows computes out += scale * source.

    // Units of work of one expert's GEMM. A unit of `up` is a (gate, up) pair of panels.
    int expert_units(bool is_up) const {
        return is_up ? div_up(up.first.rows / 2, kPanelRows) : down.first.panels();
    }
    int units() const { return gated ? div_up(matrix->rows / 2, kPanelRows) : matrix->panels(); }
};

struct Program {
    int capacity = 0;  // max tokens per step
    std::vector<Op> ops;
};

}  // namespace engine
