// From logits to tokens, row by row: penalties, bias, mask, temperature, top-k, top-p, min-p, sample_token.
//
// Log-probabilities are those of the model itself, before any of these. Top-k, top-p and min-p are
// floors: every token as likely as the min_prob likely one kept is kept too. The sample_token adds noise that is a
// function of (seed, choice, position, token) and takes the largest; temperature 0 takes it without.
//
// A step: `begin`, then `sample_row` once for every row, by any threads in any order, then `end`.
#pragma once
#include <vector>

#include "base/kernels.h"
#include "base/memory.h"

namespace engine {

constexpr int kNotForced = -1;  // in `forced`: nothing is

// How each row chooses. Borrowed from `begin` to `end`.
struct SamplingArrays {
    int rows = 0;
    const int32_t* slots = nullptr;
    const float* temperature = nullptr;  // 0: greedy
    const int32_t* top_k = nullptr;      // 0: off
    const float* top_p = nullptr;        // 1: off
    const float* min_p = nullptr;        // 0: off
    const float* repetition = nullptr;   // 1: off; over prompt and output
    const float* presence = nullptr;     // 0: off; over output
    const float* frequency = nullptr;    // 0: off; over output
    const int64_t* seed = nullptr;
    const int32_t* choice = nullptr;
    const int32_t* position = nullptr;      // of the token being drawn
    const int32_t* forced = nullptr;        // the token that is told as drawn, or kNotForced
    const int32_t* num_logprobs = nullptr;  // -1: none, 0: the drawn token's, k: and of the k top_tokens
    const uint32_t* mask = nullptr;         // (rows, mask_words) bit v: token v is allowed; null: all are
    int mask_words = 0;
    int biases = 0;
    const int32_t* bias_rows = nullptr;
    const int32_t* bias_ids = nullptr;
    const float* bias_values = nullptr;
    // Tokens so far, for penalties: history h is history_tokens[history_start[h] : history_start[h + 1]].
    int histories = 0;
    const int32_t* history_slots = nullptr;
    const int32_t* history_start = nullptr;
    const int32_t* history_tokens = nullptr;
    const int32_t* history_num_prompt = nullptr;
};

// What was chosen; whoever calls `begin` owns it. Rows that ask for fewer log-probabilities than there is
// room for leave the rest alone. All but `tokens` may be null when no row asks for any.
struct SampledArrays {
    int32_t* tokens = nullptr;
    float* logprobs = nullptr;
    int32_t* top_ids = nullptr;  // (rows, top_width) top_tokens first
    float* top_logprobs = nullptr;
    int top_width = 0;
};

// One thread's room for one row.
struct SampleScratch {
    explicit SampleScratch(int vocab);

    std::vector<float> adjusted, values, weights, maxima, ranked_maxima;
    std::vector<int32_t> ids;
    std::vector<int32_t> seen;  // zero between rows
};

class Sampler {
  public:
    Sampler(int vocab, int max_slots, int max_seq_len);

    // Takes over the histories that came with the step. Throws std::invalid_argument on an index that
    // is out of bounds, before anything has changed.
    void begin(const SamplingArrays& inputs, const SampledArrays& outputs);
    // `logits` stay as they are. NaN is never drawn; a row of nothing else gives token 0.
    void sample_row(const Kernels& kernels, const float* logits, int row, SampleScratch& scratch) const;
    // Appends the tokens that were drawn to their histories, in a step with penalties.
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
    std::vector<uint32_t> words_;      // one well-mixed word per token
    Block history_;                    // (max_slots, max_seq_len + 1) tokens at their positions
    std::vector<int32_t> num_prompt_;  // (max_slots)
    std::vector<int32_t> bias_start_;  // (rows + 1) into bias_order_
    std::vector<int32_t> bias_order_;
};

}  // namespace engine
