// A mixture of experts: chooses the experts of each token, and sorts the tokens of a step by expert.
//
// The tokens of one expert are the rows of one small GEMM. Decode and prefill tokens may use different
// numerics, so an expert has up to two GEMMs. A row's result does not depend on the other rows.
#pragma once
#include <vector>

#include "base/memory.h"
#include "executor/program.h"

namespace engine {

// Chooses the experts of one token. weights[e] becomes the weight of expert e, or 0 if it is not chosen.
// `scratch` has room for two floats per expert.
void route(const Routing& routing, const float* logits, int experts, float* scratch, float* weights);

class ExpertBatch {
  public:
    // One GEMM: the rows of one expert that use the same numerics.
    struct Gemm {
        int expert;
        bool is_prefill;
        int first, rows;
        size_t up_input, down_input;  // offsets of the packed activations
    };

    // Sorts tokens [0, tokens) by expert. Token t has the weights `weights + t * op.experts`.
    void assign(const Kernels& kernels, const Op& op, const float* weights, int tokens, int decode_tokens);

    int num_rows() const { return int(token_of_.size()); }
    int num_gemms() const { return int(gemms_.size()); }
    const Gemm& gemm(int index) const { return gemms_[size_t(index)]; }
    const Gemm& gemm_of_row(int row) const { return gemms_[size_t(gemm_of_[size_t(row)])]; }
    int token(int row) const { return token_of_[size_t(row)]; }
    uint8_t* input(size_t offset) const { return input_.data() + offset; }
    float* inner(int row) const { return inner_.floats() + size_t(row) * size_t(inner_width_); }
    float* result(int row) const { return result_.floats() + size_t(row) * size_t(result_width_); }
    int inner_width() const { return inner_width_; }
    int result_width() const { return result_width_; }

    // Adds the weighted results of a token's experts to out[0:size], in the order of the experts.
    void combine(int token, float scale, int size, float* out) const;

  private:
    struct Row {
        int32_t row;
        float weight;
    };

    std::vector<Gemm> gemms_;
    std::vector<int32_t> token_of_, gemm_of_;  // by row
    std::vector<int32_t> starts_,
        token_starts_;  // first row of each expert and kind; first entry of each token
    std::vector<Row> rows_of_token_;
    Block input_, inner_, result_;
    int inner_width_ = 0, result_width_ = 0;
};

}  // namespace engine
