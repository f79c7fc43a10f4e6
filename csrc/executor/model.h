// `Model`: a loaded model with its weights, KV cache and programs. A step has two halves, `forward` and
// `sample`.
#pragma once
#include "executor/executor.h"
#include "sampler/sampler.h"

namespace engine {

// A step as the scheduler describes it. Each row is one sequence and has consecutive tokens. The
// arrays belong to the caller.
struct StepArrays {
    int tokens, rows, table_width, logits, groups;
    const int32_t* token_ids;
    const int32_t* positions;
    const int64_t* write_slots;
    const int32_t* query_start;  // (rows + 1) row r has the tokens [query_start[r], query_start[r + 1])
    const int32_t* num_prompt;   // (rows) prompt length; positions below it are prefill
    const int32_t* block_tables;
    const int32_t* logit_rows;  // (logits) indices into tokens
    const int32_t* prefix_groups;
    const int32_t* prefix_blocks;
    // Slots and block tables of the windowed layers' KV cache. They are not read if the model has none.
    const int64_t* window_slots;
    const int32_t* window_tables;
    const int32_t* visible_end;  // see Batch; null: attention is causal
    const int32_t* token_types;  // see Batch; null: all are 0
    const int32_t* slots;        // (rows) index of each sequence's state
    const int32_t* state_load;   // (rows) index of a state to copy to the row's own before the step; -1: none
    const int32_t* state_save;   // (rows) index of a state to copy the row's own to after the step; -1: none
    // Embeddings of images, and the tokens whose embeddings they replace. There are none if num_embeds is 0.
    int num_embeds;
    const float* embeds;         // (num_embeds, embedding size)
    const int32_t* embed_rows;   // (num_embeds) indices into tokens
    const int32_t* adapter_ids;  // (rows) the LoRA adapter of each row; 0: none. null: all are 0
    TapArrays taps{};            // their tokens are indices into tokens
};

class Model {
  public:
    Model(const Kernels& kernels, int threads, const Placement& placement)
        : executor(kernels, threads, placement) {}

    // Computes the step. On invalid input, throws std::invalid_argument before any state changes. finite[r]
    // becomes 0 if the activations of row r contain NaN or infinity.
    void forward(const StepArrays& step, uint8_t* finite);
    // Creates the sampler. It must be called before `sample`.
    void set_sampler(int vocab, int max_slots, int max_seq_len);
    // Samples one token for each entry of `logit_rows` of the last step, in the same order.
    void sample(const SamplingArrays& inputs, const SampledArrays& outputs);

    // The logits of token `logit_rows[index]` of the last step.
    float* logits(int index) const { return executor.at(output, logit_place_[size_t(index)]); }
    int num_logits() const { return batch_.logits; }
    int hidden_size() const { return executor.program(1).ops.back().matrix->columns; }
    // The hidden state of token `logit_rows[index]` after the final norm.
    void hidden(int index, float* out) const;
    // The logits of a residual stream `x` after the last layer, by the model's own final norm and LM head. The
    // logits of the last step are lost.
    void unembed(const float* x, int rows, float* out);
    // How much each value of a normalized residual stream adds to the logit of a token: the token's row of the
    // LM head, times the weights of the final norm.
    void head_row(int token, float* out) const;

    Executor executor;
    int output = -1;  // buffer that holds the logits
    int max_positions = 0;

  private:
    void check(const StepArrays& step) const;
    void check_cache(const StepArrays& step, const KvCache& cache, const int32_t* tables,
                     const int64_t* slots) const;
    void check_taps(const StepArrays& step) const;
    void reorder(const StepArrays& step);
    void find_runs(const StepArrays& step);
    void place_taps(const StepArrays& step);

    Batch batch_;
    std::vector<int32_t> order_;  // index in the batch -> index in the step
    std::vector<int32_t> token_ids_, positions_, visible_end_, token_types_;
    std::vector<int32_t> row_of_, logit_tokens_, logit_place_, place_of_;
    std::vector<int64_t> write_slots_, window_slots_;
    std::vector<const float*> embeds_;
    std::vector<AdapterRun> runs_, logit_runs_;
    std::vector<int32_t> tap_tokens_, logit_of_;
    std::vector<uint8_t> finite_;
    std::unique_ptr<Sampler> sampler_;
    std::vector<SampleScratch> sample_scratch_;
};

}  // namespace engine
