// The work of attention over one step: who looks at which chunk, and whose parts are then merged.
//
// The schedule depends on the batch alone, so it is made once a step and serves all layers. Tokens that
// look at the same blocks of a chunk (rows with a common prefix, tokens of one prompt) form one item, so
// that the chunk is read once for all of them. An item that is the only one of each of its tokens writes
// to `out` at once; the others leave parts, which are merged in a second round.
#pragma once
#include <vector>

#include "base/kernels.h"

namespace engine {

constexpr int kMaxPrefillTokens = 32;  // max_tokens tokens of a prompt in one item
constexpr int kMaxDecodeTokens = 16;   // max_tokens generated tokens in one item
constexpr int kMaxItemTokens = kMaxPrefillTokens;

struct AttentionItem {
    int32_t first;       // index into Batch::item_tokens
    int32_t count;       // tokens; all of them find the item's chunks through the first one's block table
    int32_t chunk;       // first chunk; positions [chunk * kChunk, ...)
    int32_t chunks;      // consecutive chunks that the item goes through in order
    int32_t part;        // where its parts begin, those of a token together; -1: the item is its tokens' only
                         // one, it merges in order itself and writes to `out`
    bool merges_chunks;  // no token sees anything before the item: it leaves one part per token, all of its
                         // chunks merged in order; otherwise one part per token and chunk
    bool is_prefill;

    int parts_per_token() const { return merges_chunks ? 1 : chunks; }
};

struct AttentionMerge {
    int32_t token;
    int32_t first;  // index into Batch::merge_parts, in order of the chunks
    int32_t count;
};

class AttentionSchedule {
  public:
    // Fills the batch's attention fields, which point into this object until the next call.
    void build(Batch& batch, int block_size, int window);
    int num_parts() const { return num_parts_; }

  private:
    struct Span {
        int first, count;  // of item_tokens_
        int begin, end;    // chunks
        bool is_first;     // of each of its tokens
        bool is_only;
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

// A part: the weighted values [heads][dim], then [heads] pairs (maximum, sum), in whole cache lines.
size_t part_floats(const AttentionShape& shape);

// Zeroes the keys and values of `slot` in all layers. The cache must never hold what is not finite where a
// later sequence could meet it, not even past its end: a step that failed is erased before its blocks go.
void erase_kv(const KvCache& cache, int64_t slot);

}  // namespace engine
