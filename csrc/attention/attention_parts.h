// Code that all attention kernels share: which positions a token attends to, where the keys and
// values of a chunk are, and how partial results are merged.
//
// The online softmax is in base 2: queries are pre-multiplied by scale * log2(e), so softmax
// weights are exp2(score - max). `merge_into` must give the same bits in every instruction set. It
// therefore uses no FMA, and floating-point contraction is off.
#pragma once
#include "attention/attention.h"

#if defined(__clang__)
#define ENGINE_NO_CONTRACTION static
#pragma clang fp contract(off)
#else
#define ENGINE_NO_CONTRACTION __attribute__((noinline, optimize("fp-contract=off"))) static
#endif

namespace engine {
namespace {

constexpr int kChunkTiles = kChunk / 16;
constexpr int kPrefetchTiles = 3;
constexpr float kLog2E = 1.44269504f;

ENGINE_INLINE Range visible(const AttentionJob& job, int token) {
    return visible_positions(*job.batch, token, job.shape->window, job.shape->centered);
}

// The positions of a chunk that a token attends to, relative to the start of the chunk.
ENGINE_INLINE Range visible_in_chunk(const AttentionJob& job, int token, int chunk) {
    Range range = visible(job, token);
    int begin = range.begin - chunk * kChunk, end = range.end - chunk * kChunk;
    return {begin > 0 ? begin : 0, end < kChunk ? end : kChunk};
}

// Addresses of the tiles of a chunk, and of the tiles to prefetch. Tiles [begin, end) are those
// that at least one token of the item attends to. Each array has further entries after `end`, for
// prefetching.
struct ChunkTiles {
    const uint8_t* keys[kChunkTiles + kPrefetchTiles];    // after `end`: the first value tiles
    const uint8_t* values[kChunkTiles + kPrefetchTiles];  // after `end`: the first value tiles again
    const uint8_t* next_keys[kChunkTiles];  // a tile of the next chunk for each tile of this chunk
    const uint8_t* next_values[kChunkTiles];
    int begin, end;
};

ENGINE_INLINE Range seen_tiles(const AttentionJob& job, const AttentionItem& item, int chunk) {
    Range seen{kChunk, 0};
    for (int i = 0; i < item.count; i++) {
        Range range = visible_in_chunk(job, job.batch->item_tokens[item.first + i], chunk);
        if (range.empty()) continue;
        if (range.begin < seen.begin) seen.begin = range.begin;
        if (range.end > seen.end) seen.end = range.end;
    }
    return {seen.begin / 16, div_up(seen.end, 16)};
}

ENGINE_INLINE const uint8_t* find_keys(const AttentionJob& job, const AttentionItem& item, int head,
                                       int chunk, int tile) {
    const Batch& batch = *job.batch;
    const int32_t* table = batch.table(batch.row_of[batch.item_tokens[item.first]]);
    int tiles_per_block = job.cache->block_size / 16, index = chunk * kChunkTiles + tile;
    return job.cache->key_tile(job.layer, table[index / tiles_per_block], head, index % tiles_per_block);
}

struct ChunkPlace {
    int index, head, chunk;  // index of the item, of the kv head and of the chunk
};

// The chunk that the thread most likely reads next. It is the next chunk of the same item, else the first
// chunk for the next kv head, else the first chunk of the next item.
ENGINE_INLINE ChunkPlace next_place(const AttentionJob& job, ChunkPlace place) {
    const AttentionItem& item = job.batch->items[place.index];
    if (place.chunk + 1 < item.chunk + item.chunks) return {place.index, place.head, place.chunk + 1};
    if (place.head + 1 < job.shape->kv_heads) return {place.index, place.head + 1, item.chunk};
    int index = place.index + 1 < job.batch->num_items ? place.index + 1 : place.index;
    return {index, 0, job.batch->items[index].chunk};
}

ENGINE_INLINE void find_next(const AttentionJob& job, ChunkPlace place, ChunkTiles& tiles) {
    const ChunkPlace after = next_place(job, place);
    const AttentionItem& item = job.batch->items[after.index];
    const Range seen = seen_tiles(job, item, after.chunk);
    for (int tile = tiles.begin; tile < tiles.end; tile++) {
        int partner = seen.begin + tile - tiles.begin;
        if (partner >= seen.end) partner = seen.begin;
        tiles.next_keys[tile] = find_keys(job, item, after.head, after.chunk, partner);
        tiles.next_values[tile] = tiles.next_keys[tile] + job.cache->value_distance();
    }
}

ENGINE_INLINE ChunkTiles find_tiles(const AttentionJob& job, ChunkPlace place) {
    const AttentionItem& item = job.batch->items[place.index];
    ChunkTiles tiles;
    Range seen = seen_tiles(job, item, place.chunk);
    tiles.begin = seen.begin;
    tiles.end = seen.end;
    for (int tile = seen.begin; tile < seen.end; tile++) {
        tiles.keys[tile] = find_keys(job, item, place.head, place.chunk, tile);
        tiles.values[tile] = tiles.keys[tile] + job.cache->value_distance();
    }
    for (int i = 0; i < kPrefetchTiles; i++) {
        int near = seen.begin + i < seen.end ? seen.begin + i : seen.begin;
        tiles.keys[seen.end + i] = tiles.values[seen.end + i] = tiles.values[near];
    }
    return tiles;
}

// The partial result of one head of one token: unnormalized output, and max and sum of the online softmax.
struct Part {
    float* values;   // [padded_value_dim]
    float* max_sum;  // {max, sum}
};

ENGINE_INLINE Part part_at(const AttentionJob& job, int index, int head) {
    const AttentionShape& shape = *job.shape;
    int dim = shape.padded_value_dim();
    float* part = job.parts + size_t(index) * part_floats(shape);
    return {part + head * dim, part + shape.heads * dim + 2 * head};
}

// exp2(x) for x <= 0.
ENGINE_NO_CONTRACTION float exp2_scalar(float x) {
    if (x < -125.0f) return 0.0f;
    float shifted = x + kRoundShift;
    float r = x - (shifted - kRoundShift);
    float p = 1.535336144e-4f * r + 1.339887457e-3f;
    p = p * r + 9.618437361e-3f;
    p = p * r + 5.550332471e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472029e-1f;
    p = p * r + 1.0f;
    return bits_to_float(float_to_bits(p) + (float_to_bits(shifted) << 23));
}

// Merges the partial result `more` into `into`. The positions of `more` come after those of `into`.
ENGINE_NO_CONTRACTION void merge_into(Part into, Part more, int dim) {
    float old_max = into.max_sum[0], more_max = more.max_sum[0];
    bool raises = old_max < more_max;
    float weight = exp2_scalar(raises ? old_max - more_max : more_max - old_max);
    float old_weight = raises ? weight : 1.0f, more_weight = raises ? 1.0f : weight;
    if (raises) into.max_sum[0] = more_max;
    into.max_sum[1] = into.max_sum[1] * old_weight + more.max_sum[1] * more_weight;
    float* __restrict values = into.values;
    const float* __restrict added = more.values;
    for (int i = 0; i < dim; i++) values[i] = values[i] * old_weight + added[i] * more_weight;
}

// The factor that normalizes an output, if softmax also sums over a sink. `sink` is in base 2.
ENGINE_NO_CONTRACTION float factor_with_sink(const float* max_sum, float sink) {
    float max = max_sum[0], top = sink > max ? sink : max;
    float weight = exp2_scalar(max - top), sink_weight = exp2_scalar(sink - top);
    return weight / (max_sum[1] * weight + sink_weight);
}

ENGINE_INLINE void normalize(Part part, const AttentionShape& shape, int head, float* __restrict out) {
    const float* sinks = shape.sinks;
    float weight = sinks ? factor_with_sink(part.max_sum, sinks[head] * kLog2E) : 1.0f / part.max_sum[1];
    int size = shape.value_dim();
    const float* __restrict values = part.values;
    for (int i = 0; i < size; i++) out[i] = values[i] * weight;
}

inline void merge(const AttentionJob& job, int index) {
    const AttentionMerge& merge = job.batch->merges[index];
    const int32_t* parts = job.batch->merge_parts + merge.first;
    const AttentionShape& shape = *job.shape;
    float* out = job.out + size_t(merge.token) * size_t(job.out_stride);
    for (int head = 0; head < shape.heads; head++) {
        Part into = part_at(job, parts[0], head);
        for (int i = 1; i < merge.count; i++)
            merge_into(into, part_at(job, parts[i], head), shape.padded_value_dim());
        normalize(into, shape, head, out + head * shape.value_dim());
    }
}

// The queries of an item for one kv head, in the order of the tokens. Each token has `group`
// queries: one for each query head that shares the kv head (GQA).
struct Queries {
    const AttentionJob* job;
    const AttentionItem* item;
    int index;  // index of the item
    int kv_head, group, count;
    float* state;  // [count][padded_value_dim] running results; used only if the item writes to `out`
    float* state_max_sum;

    int token(int query) const { return job->batch->item_tokens[item->first + query / group]; }
    int head(int query) const { return kv_head * group + query % group; }
    const float* floats(int query) const {
        const float* of_token = job->queries + size_t(token(query)) * size_t(job->query_stride);
        return of_token + head(query) * job->shape->head_dim;
    }
    float* out(int query) const {
        float* of_token = job->out + size_t(token(query)) * size_t(job->out_stride);
        return of_token + head(query) * job->shape->value_dim();
    }
    // Returns where the results of a query's chunks are accumulated.
    Part destination(int query, int chunk) const {
        if (item->part < 0)
            return {state + query * job->shape->padded_value_dim(), state_max_sum + 2 * query};
        int index = item->part + query / group * item->parts_per_token();
        return part_at(*job, item->merges_chunks ? index : index + chunk - item->chunk, head(query));
    }
    // Returns whether the query's destination holds no result of an earlier chunk yet.
    bool is_empty(int query, int chunk) const {
        bool merges = item->part < 0 || item->merges_chunks;
        return !merges || chunk == item->chunk || visible(*job, token(query)).begin >= chunk * kChunk;
    }
    // Returns where to compute the results [queries][padded_value_dim] of a chunk, for `query` and the queries
    // after it. If possible, this is the destination, which saves a copy; otherwise it is
    // `elsewhere`.
    float* result_buffer(int query, int chunk, float* elsewhere) const {
        bool in_place = item->part < 0 && chunk == item->chunk;
        return in_place ? state + query * job->shape->padded_value_dim() : elsewhere;
    }
    // Merges a chunk's result into the query's destination. Does nothing if the query attends to no
    // position of the chunk.
    void add(int query, int chunk, Part result) const {
        if (visible_in_chunk(*job, token(query), chunk).empty()) return;
        Part to = destination(query, chunk);
        int dim = job->shape->padded_value_dim();
        if (!is_empty(query, chunk)) return merge_into(to, result, dim);
        if (to.values != result.values) memcpy(to.values, result.values, size_t(dim) * sizeof(float));
        memcpy(to.max_sum, result.max_sum, 2 * sizeof(float));
    }
    void write_out() const {
        if (item->part >= 0) return;
        for (int query = 0; query < count; query++)
            normalize(destination(query, 0), *job->shape, head(query), out(query));
    }
};

ENGINE_INLINE Queries item_queries(const AttentionJob& job, int index, int kv_head) {
    const AttentionItem& item = job.batch->items[index];
    int group = job.shape->heads / job.shape->kv_heads;
    return {&job, &item, index, kv_head, group, item.count * group, nullptr, nullptr};
}

ENGINE_INLINE int max_queries(const AttentionShape& shape) {
    return kMaxItemTokens * (shape.heads / shape.kv_heads);
}

}  // namespace
}  // namespace engine
