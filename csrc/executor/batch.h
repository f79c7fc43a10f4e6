// `Batch`: the tokens of one step, in the order in which the executor and the kernels process them.
#pragma once
#include "base/common.h"

namespace engine {

struct AdapterRun;  // see adapters.h

// Decode tokens come first, then prefill tokens. Within each kind, tokens are in the order of their
// sequences. The batch does not own its arrays; they are valid during the step.
struct Batch {
    int tokens = 0;
    int decode_tokens = 0;               // tokens [0, decode_tokens) are decode, the others are prefill
    int rows = 0;                        // sequences in the step
    const int32_t* token_ids = nullptr;  // (tokens)
    const int32_t* positions = nullptr;  // (tokens)
    // (tokens) a token attends to the positions below this one. null: below the one after its own.
    const int32_t* visible_end = nullptr;
    const int32_t* token_types = nullptr;  // (tokens) rows of an encoder's table of token types; null: all 0
    // (tokens) embeddings that replace those of the tokens, or null for a token that keeps its own. null: all
    // tokens keep theirs.
    const float* const* embeds = nullptr;
    const int64_t* write_slots = nullptr;  // (tokens) cache slot to write: block * block_size + offset
    const int32_t* row_of = nullptr;       // (tokens) index of the token's sequence
    const int32_t* tables = nullptr;       // (rows, table_width) block tables: KV block ids
    int table_width = 0;
    // The same for the layers with a sliding window, if these have a KV cache of their own.
    const int64_t* window_slots = nullptr;   // (tokens)
    const int32_t* window_tables = nullptr;  // (rows, table_width)
    // For layers that keep a state: row r has the tokens row_tokens[row_start[r] : row_start[r + 1]], in the
    // order of positions. slots[r] is the index of its state.
    const int32_t* row_start = nullptr;
    const int32_t* row_tokens = nullptr;
    const int32_t* slots = nullptr;
    // (rows) the prefix group of each sequence. Sequences of one group share their first KV blocks.
    // -1: the sequence is in no group.
    const int32_t* prefix_groups = nullptr;
    const int32_t* prefix_blocks = nullptr;  // (groups) number of KV blocks that the group shares
    const int32_t* logit_tokens = nullptr;   // (logits) tokens whose logits are computed, ascending
    const int32_t* logit_of = nullptr;       // (tokens) index into logit_tokens, or -1; null: no taps
    int logits = 0;
    int decode_logits = 0;  // how many of logit_tokens are decode tokens
    // The tokens with a LoRA adapter, and the logits of such tokens.
    const AdapterRun* runs = nullptr;
    int num_runs = 0;
    const AdapterRun* logit_runs = nullptr;
    int num_logit_runs = 0;
    // The attention schedule, see attention.h.
    const struct AttentionItem* items = nullptr;
    int num_items = 0;
    const int32_t* item_tokens = nullptr;
    const struct AttentionMerge* merges = nullptr;
    int num_merges = 0;
    const int32_t* merge_parts = nullptr;

    const int32_t* table(int row) const { return tables + size_t(row) * size_t(table_width); }
};

}  // namespace engine
