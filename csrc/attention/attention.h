// The attention schedule of one step. It says which tokens attend to which chunks of the KV
// sequence, and which partial results are merged.
//
// The schedule depends only on the batch, so it is built once per step and used in all layers. A
// chunk is a range of 256 positions. Tokens that attend to the same KV blocks of a chunk form one
// item, and the chunk is read once for all of them. Examples are the tokens of sequences with a
// common prefix, and the tokens of one prefill. If an item covers the whole context of its tokens,
// it writes to `out`. All other items write partial results, called parts, which are merged in a
// second round.
#pragma once
#include <vector>

#include "base/kernels.h"

namespace engine {

constexpr int kMaxPrefillTokens = 32;  // max prefill tokens in an item
constexpr int kMaxDecodeTokens = 16;   // max decode tokens in an item
constexpr int kMaxItemTokens = kMaxPrefillTokens;

struct Range {
    int begin, end;
    bool empty() const { return begin >= end; }
};

// Positions that a token attends to. With a `centered` window, they are on both sides of the token.
inline Range visible_positions(const Batch& batch, int token, int window, bool centered) {
    int position = batch.positions[token];
    int end = batch.visible_end ? batch.visible_end[token] : position + 1;
    if (centered && window > 0 && end > position + window) end = position + window;
    return {window > 0 && position >= window ? position - window + 1 : 0, end};
}

struct AttentionItem {
    int32_t first;       // index into Batch::item_tokens
    int32_t count;       // number of tokens; the block table of the first token is used for all of them
    int32_t chunk;       // number of the first chunk, which starts at position chunk * kChunk
    int32_t chunks;      // number of consecutive chunks, which are processed in order
    int32_t part;        // index of the item's first part; the parts of a token are adjacent. -1: the item
                         // covers the whole context of its tokens, merges its chunks and writes to `out`
    bool merges_chunks;  // true: no token attends to positions before the item's first chunk, so the item
                         // merges its chunks in order and writes one part per token.
                         // false: the item writes one part for each token and chunk
    bool is_prefill;

    int parts_per_token() const { return merges_chunks ? 1 : chunks; }
};

struct AttentionMerge {
    int32_t token;
    int32_t first;  // index of the token's first part in Batch::merge_parts; parts are in chunk order
    int32_t count;  // number of the token's parts
};

class AttentionSchedule {
  public:
    // Fills the attention fields of `batch`. They point into this object and are valid until the next call.
    void build(Batch& batch, int block_size, int window, bool centered = false);
    int num_parts() const { return num_parts_; }

  private:
    // A group of tokens and the range of chunks that they attend to together.
    struct Span {
        int first, count;  // the tokens: a range of item_tokens_
        int begin, end;    // range of chunks
        bool is_first;     // true: no other span has earlier chunks of these tokens
        bool is_only;      // true: no other span has these tokens
        bool is_prefill;
    };
    struct TokenPart {
        int32_t token, part;
    };

    Range seen(int token) const { return visible_positions(*batch_, token, window_, centered_); }
    int first_chunk(int token) const { return seen(token).begin / kChunk; }
    int last_chunk(int token) const { return (seen(token).end - 1) / kChunk; }
    int shared_chunks(int token) const;
    void add_shared_spans();
    void add_row_spans(int begin, int end, int max_tokens, bool is_prefill);
    void add_items(const Span& span, int64_t target);
    void add_merges();

    const Batch* batch_ = nullptr;
    int block_size_ = 0, window_ = 0;
    bool centered_ = false;
    int num_parts_ = 0;
    std::vector<AttentionItem> items_;
    std::vector<AttentionMerge> merges_;
    std::vector<int32_t> item_tokens_;
    std::vector<int32_t> merge_parts_;
    std::vector<Span> spans_;
    std::vector<TokenPart> token_parts_;
    std::vector<int32_t> shared_;  // (tokens) leading chunks that the token shares with other sequences
    std::vector<int32_t> group_ends_, starts_;
};

// Size of a part in floats. A part holds unnormalized outputs [heads][dim], then (max, sum) pairs
// [heads]. It is padded to whole cache lines.
size_t part_floats(const AttentionShape& shape);

// Zeroes the keys and values of cache slot `slot` in all layers. Kernels read whole tiles of the
// cache, also past the end of a sequence, so the cache must never hold NaN or infinity. If a
// token's activations are not finite, the executor erases the slot that the token wrote.
void erase_kv(const KvCache& cache, int64_t slot);

}  // namespace engine
