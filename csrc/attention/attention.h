// The attention schedule of one step: which tokens attend to which chunks, and which partial results are
// merged.
//
// It depends only on the batch, so it is built once per step and serves all layers. Tokens that attend to the
// same blocks of a chunk (rows with a common prefix, tokens of one prefill) form one item, so that the chunk
// is read once for all of them. An item that covers its tokens' whole context writes to `out`. The other
// items leave parts, which a second round merges.
#pragma once
#include <vector>

#include "base/kernels.h"

namespace engine {

constexpr int kMaxPrefillTokens = 32;  // per item
constexpr int kMaxDecodeTokens = 16;   // per item
constexpr int kMaxItemTokens = kMaxPrefillTokens;

struct AttentionItem {
    int32_t first;       // index into Batch::item_tokens
    int32_t count;       // tokens; they all use the block table of the first one
    int32_t chunk;       // first chunk; it starts at position chunk * kChunk
    int32_t chunks;      // consecutive chunks, processed in order
    int32_t part;        // first part, the parts of a token adjacent; -1: the item covers its tokens' whole
                         // context, merges its chunks itself and writes to `out`
    bool merges_chunks;  // no token attends to earlier positions: the item merges its chunks in order and
                         // leaves one part per token; otherwise one part per token and chunk
    bool is_prefill;

    int parts_per_token() const { return merges_chunks ? 1 : chunks; }
};

struct AttentionMerge {
    int32_t token;
    int32_t first;  // index into Batch::merge_parts, in chunk order
    int32_t count;
};

class AttentionSchedule {
  public:
    // Fills the batch's attention fields. They point into this object until the next call.
    void build(Batch& batch, int block_size, int window);
    int num_parts() const { return num_parts_; }

  private:
    struct Span {
        int first, count;  // range of item_tokens_
        int begin, end;    // range of chunks
        bool is_first;     // its tokens have no earlier span
        bool is_only;      // its tokens have no other span
        bool is_prefill;
    };
    struct TokenPart {
        int32_t token, part;
    };

    int first_chunk(int token) const;
    int shared_chunks(int token) const;
    void add_shared_spans();
    void add_row_spans(int begin, int end, int max_tokens, bool is_prefill);
    void add_items(const Span& span, int64_t target);
    void add_merges();

    const Batch* batch_ = nullptr;
    int block_size_ = 0, window_ = 0;
    int num_parts_ = 0;
    std::vector<AttentionItem> items_;
    std::vector<AttentionMerge> merges_;
    std::vector<int32_t> item_tokens_;
    std::vector<int32_t> merge_parts_;
    std::vector<Span> spans_;
    std::vector<TokenPart> token_parts_;
    std::vector<int32_t> shared_;  // (tokens) leading chunks that a shared span covers
    std::vector<int32_t> group_ends_, starts_;
};

// Floats of a part: unnormalized outputs [heads][dim], then (max, sum) pairs [heads], in whole cache lines.
size_t part_floats(const AttentionShape& shape);

// Zeroes the keys and values of `slot` in all layers. Kernels read whole tiles, past the end of a sequence
// too, so the cache must never hold NaN or infinity. A failed step is erased before its blocks are freed.
void erase_kv(const KvCache& cache, int64_t slot);

}  // namespace engine
