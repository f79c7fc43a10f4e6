// Builds the attention schedule of a step, and erases slots of the KV cache.
#include "attention/attention.h"

#include <algorithm>

#include "attention/attention_cache.h"

namespace engine {

namespace {

// A step's attention is split along the KV sequence into at least this many runs of consecutive
// chunks, if the contexts are long enough. Each run is one unit of work per kv head, so there is
// work for all threads.
constexpr int kMinSplits = 8;

// Max parts of a step for which prefill is still split along the KV sequence. A longer prefill
// keeps all threads busy without a split, and its parts would need much memory.
constexpr int kMaxPrefillParts = 2048;

}  // namespace

// Returns how many leading chunks lie in KV blocks that the token's sequence shares with other
// sequences. Returns 0 if these chunks extend past the token's position, or if all of them are
// before its sliding window.
int AttentionSchedule::shared_chunks(int token) const {
    if (!batch_->prefix_groups) return 0;
    int group = batch_->prefix_groups[batch_->row_of[token]];
    if (group < 0) return 0;
    int chunks = int(int64_t(batch_->prefix_blocks[group]) * block_size_ / kChunk);
    bool sees_all = seen(token).end >= chunks * kChunk;
    return sees_all && first_chunk(token) < chunks ? chunks : 0;
}

// Fills shared_, and adds spans for the chunks that the decode tokens of several sequences share.
void AttentionSchedule::add_shared_spans() {
    shared_.assign(size_t(batch_->tokens), 0);
    if (!batch_->prefix_groups) return;
    auto group_of = [this](int token) { return batch_->prefix_groups[batch_->row_of[token]]; };
    group_ends_.clear();
    for (int token = 0; token < batch_->decode_tokens; token++) {
        shared_[size_t(token)] = shared_chunks(token);
        if (shared_[size_t(token)] == 0) continue;
        size_t group = size_t(group_of(token));
        if (group >= group_ends_.size()) group_ends_.resize(group + 1, 0);
        group_ends_[group]++;
    }
    int total = 0;
    for (int32_t& end : group_ends_) end = total += end;
    size_t base = item_tokens_.size();
    item_tokens_.resize(base + size_t(total));
    for (int token = batch_->decode_tokens - 1; token >= 0; token--)
        if (shared_[size_t(token)] > 0)
            item_tokens_[base + size_t(--group_ends_[size_t(group_of(token))])] = token;
    for (size_t group = 0; group < group_ends_.size(); group++) {  // group_ends_ now has starts
        int begin = group_ends_[group], end = group + 1 < group_ends_.size() ? group_ends_[group + 1] : total;
        if (end - begin == 1) shared_[size_t(item_tokens_[base + size_t(begin)])] = 0;
        if (end - begin <= 1) continue;
        for (int at = begin; at < end; at += kMaxDecodeTokens) {
            int count = std::min(kMaxDecodeTokens, end - at);
            const int32_t* tokens = item_tokens_.data() + base + at;
            int chunks = shared_[size_t(tokens[0])], first = chunks;
            for (int i = 0; i < count; i++) first = std::min(first, first_chunk(tokens[i]));
            spans_.push_back({int(base) + at, count, first, chunks, true, false, false});
        }
    }
}

// Adds spans for the chunks of tokens [begin, end) that are not shared. A span has up to
// `max_tokens` tokens of one sequence.
void AttentionSchedule::add_row_spans(int begin, int end, int max_tokens, bool is_prefill) {
    for (int token = begin; token < end;) {
        int row = batch_->row_of[token], shared = shared_[size_t(token)];
        Span span{int(item_tokens_.size()), 0, INT32_MAX, 0, shared == 0, shared == 0, is_prefill};
        for (; token < end && span.count < max_tokens; token++) {
            if (batch_->row_of[token] != row || shared_[size_t(token)] != shared) break;
            int first = std::max(first_chunk(token), shared), last = last_chunk(token);
            if (first > last) {
                if (span.count > 0) break;
                continue;
            }
            item_tokens_.push_back(token);
            span.count++;
            span.begin = std::min(span.begin, first);
            span.end = std::max(span.end, last + 1);
        }
        if (span.count > 0) spans_.push_back(span);
    }
}

// Splits a span into items, along the KV sequence. An item has about `target` units of work; a unit
// is one chunk for one token.
void AttentionSchedule::add_items(const Span& span, int64_t target) {
    int length = span.end - span.begin;
    int runs = div_up(length, int(std::max<int64_t>(1, target / span.count)));
    if (span.is_prefill && num_parts_ + span.count * length > kMaxPrefillParts) runs = 1;
    int run_length = div_up(length, runs);
    for (int begin = span.begin; begin < span.end; begin += run_length) {
        int end = std::min(begin + run_length, span.end);
        bool merges_chunks = span.is_first && begin == span.begin;
        AttentionItem item{span.first, span.count, begin, end - begin, -1, merges_chunks, span.is_prefill};
        if (!span.is_only || item.chunks < length) {
            item.part = num_parts_;
            num_parts_ += span.count * item.parts_per_token();
            for (int i = 0; i < span.count; i++) {
                int token = item_tokens_[size_t(span.first + i)];
                int first = std::max(begin, first_chunk(token));
                int last = std::min(end - 1, last_chunk(token));
                int part = item.part + i * item.parts_per_token();
                if (merges_chunks && first <= last) token_parts_.push_back({token, part});
                for (int chunk = first; !merges_chunks && chunk <= last; chunk++)
                    token_parts_.push_back({token, part + chunk - begin});
            }
        }
        items_.push_back(item);
    }
}

// Lists the parts of each token in merges_ and merge_parts_. This is a counting sort by token,
// which leaves the parts of one token in chunk order.
void AttentionSchedule::add_merges() {
    if (token_parts_.empty()) return;
    starts_.assign(size_t(batch_->tokens) + 1, 0);
    for (const TokenPart& part : token_parts_) starts_[size_t(part.token) + 1]++;
    for (int token = 0; token < batch_->tokens; token++) {
        int count = starts_[size_t(token) + 1];
        starts_[size_t(token) + 1] += starts_[size_t(token)];
        if (count > 0) merges_.push_back({token, starts_[size_t(token)], count});
    }
    merge_parts_.resize(token_parts_.size());
    for (const TokenPart& part : token_parts_) {
        int32_t& at = starts_[size_t(part.token)];
        merge_parts_[size_t(at++)] = part.part;
    }
}

void AttentionSchedule::build(Batch& batch, int block_size, int window, bool centered) {
    batch_ = &batch;
    block_size_ = block_size;
    window_ = window;
    centered_ = centered;
    num_parts_ = 0;
    items_.clear();
    merges_.clear();
    item_tokens_.clear();
    merge_parts_.clear();
    spans_.clear();
    token_parts_.clear();
    add_shared_spans();
    add_row_spans(0, batch.decode_tokens, kMaxDecodeTokens, false);
    add_row_spans(batch.decode_tokens, batch.tokens, kMaxPrefillTokens, true);
    int64_t work = 0;
    for (const Span& span : spans_) work += int64_t(span.count) * (span.end - span.begin);
    int64_t target = (work + kMinSplits - 1) / kMinSplits;
    for (const Span& span : spans_) add_items(span, target);
    add_merges();
    batch.items = items_.data();
    batch.num_items = int(items_.size());
    batch.item_tokens = item_tokens_.data();
    batch.merges = merges_.data();
    batch.num_merges = int(merges_.size());
    batch.merge_parts = merge_parts_.data();
}

size_t part_floats(const AttentionShape& shape) {
    return round_up_size(size_t(shape.heads) * size_t(shape.padded_value_dim() + 2), 16);
}

void erase_kv(const KvCache& cache, int64_t slot) {
    TokenPlace place = place_of(cache, slot);
    int dim = cache.dim();
    size_t size = value_bytes(cache.type);
    for (int layer = 0; layer < cache.layers; layer++) {
        for (int head = 0; head < cache.kv_heads; head++) {
            uint8_t* keys = cache.key_tile(layer, place.block, head, place.tile);
            uint8_t* values = cache.value_tile(layer, place.block, head, place.tile);
            for (int i = 0; i < dim; i++) memset(keys + key_offset(cache.type, place.lane, i), 0, size);
            if (cache.type == KvType::INT8) *scale_at(keys, dim, place.lane) = 0;
            if (cache.latent > 0) continue;
            for (int i = 0; i < dim; i++)
                memset(values + value_offset(cache.type, dim, place.lane, i), 0, size);
            if (cache.type == KvType::INT8) *scale_at(values, dim, place.lane) = 0;
        }
    }
}

}  // namespace engine
