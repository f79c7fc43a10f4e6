// The sampler turns each row of logits into a token. It applies, in this order: penalties, logit
// bias, mask, temperature, top-k, top-p, min-p. Then it samples.
//
// Log-probabilities are those of the unmodified logits. Top-k, top-p and min-p are thresholds, so
// tokens that tie with the last kept token are kept too. Sampling is Gumbel-max: noise is added to
// each logit, and the token with the largest sum wins. The noise is a function of (seed, choice,
// position, token). Temperature 0 is greedy.
//
// For each step, call `begin`, then `sample_row` once per row from any thread in any order, then
// `end`.
#pragma once
#include <vector>

#include "base/kernels.h"
#include "base/memory.h"

namespace engine {

constexpr int kNotForced = -1;  // value of `forced` if the token of the row is to be sampled

// Sampling parameters, one entry per row. The arrays belong to the caller and must stay valid from
// `begin` to `end`.
struct SamplingArrays {
    int rows = 0;
    const int32_t* slots = nullptr;
    const float* temperature = nullptr;  // 0: greedy
    const int32_t* top_k = nullptr;      // 0: off
    const float* top_p = nullptr;        // 1: off
    const float* min_p = nullptr;        // 0: off
    const float* repetition = nullptr;   // 1: off; covers prompt and output tokens
    const float* presence = nullptr;     // 0: off; counts output tokens
    const float* frequency = nullptr;    // 0: off; covers output tokens
    const int64_t* seed = nullptr;
    const int32_t* choice = nullptr;
    const int32_t* position = nullptr;      // position of the sampled token
    const int32_t* forced = nullptr;        // token to return without sampling, or kNotForced
    const int32_t* num_logprobs = nullptr;  // -1: none; 0: sampled token only; k: also the top k tokens
    const uint32_t* mask = nullptr;         // (rows, mask_words) bit v allows token v; null: no mask
    int mask_words = 0;
    int biases = 0;
    const int32_t* bias_rows = nullptr;
    const int32_t* bias_ids = nullptr;
    const float* bias_values = nullptr;
    // Tokens that a sequence already has, for penalties. History h is
    // history_tokens[history_start[h] : history_start[h + 1]].
    int histories = 0;
    const int32_t* history_slots = nullptr;
    const int32_t* history_start = nullptr;
    const int32_t* history_tokens = nullptr;
    const int32_t* history_num_prompt = nullptr;
};

// Results of a step. The arrays belong to the caller of `begin`. If a row asks for fewer than
// `top_width` log-probabilities, the remaining entries of this row are not written. If no row asks
// for log-probabilities, all arrays except `tokens` may be null.
struct SampledArrays {
    int32_t* tokens = nullptr;
    float* logprobs = nullptr;
    int32_t* top_ids = nullptr;  // (rows, top_width) most likely token first
    float* top_logprobs = nullptr;
    int top_width = 0;  // max number of top tokens that any row asks for
};

// Scratch memory of one thread.
struct SampleScratch {
    explicit SampleScratch(int vocab);

    std::vector<float> adjusted, values, weights, maxima, ranked_maxima;
    std::vector<int32_t> ids;
    std::vector<int32_t> seen;  // all zero before and after each row
};

class Sampler {
  public:
    Sampler(int vocab, int max_slots, int max_seq_len);

    // Starts a step and stores the histories that came with it. If an index is out of bounds, throws
    // std::invalid_argument before any state changes.
    void begin(const SamplingArrays& inputs, const SampledArrays& outputs);
    // Samples the token of one row. Does not modify `logits`. NaN is never sampled, but a row that
    // is all NaN gives token 0.
    void sample_row(const Kernels& kernels, const float* logits, int row, SampleScratch& scratch) const;
    // Ends the step. If any row of the step has penalties, appends the sampled tokens to the histories.
    void end();

    int vocab() const { return vocab_; }

  private:
    void check(const SamplingArrays& inputs, const SampledArrays& outputs) const;
    void index_biases();
    int32_t* tokens_of(int slot) const;
    bool is_penalized(int row) const;

    const float* adjust(const Kernels& kernels, const float* logits, int row, SampleScratch& scratch) const;
    void penalize(float* logits, int row, SampleScratch& scratch) const;
    int sample_token(const Kernels& kernels, const float* logits, int row, SampleScratch& scratch) const;
    void write_logprobs(const Kernels& kernels, const float* logits, int row, SampleScratch& scratch) const;

    int vocab_, max_slots_, max_seq_len_;
    SamplingArrays in_;
    SampledArrays out_;
    bool has_penalties_ = false;
    std::vector<uint32_t> words_;      // one hash per token of the vocabulary
    Block history_;                    // (max_slots, max_seq_len + 1) the tokens of each slot, by position
    std::vector<int32_t> num_prompt_;  // (max_slots) prompt length
    std::vector<int32_t> bias_start_;  // (rows + 1) indices into bias_order_
    std::vector<int32_t> bias_order_;
};

}  // namespace engine
