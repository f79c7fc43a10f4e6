// The softmax of attention, which runs between QK and PV, and the scratch memory of attention. Each
// including file is compiled for one instruction set, which sets the vector width.
#pragma once
#include "attention/attention_parts.h"
#include "attention/attention_vectors.h"
#include "base/unroll.h"

namespace engine {
namespace {

constexpr int kBatch = 48;  // max queries whose scores are in memory at the same time

// The addresses to prefetch while a tile of the cache is read. `soon` is a tile that is read soon
// and goes to L1. `later` is a tile of the next chunk and goes to L2. Both may be null.
struct Prefetch {
    const uint8_t *soon, *later;

    __attribute__((always_inline)) void at(int offset) const {
        if (kConvertsOnce && !soon) return;
        __builtin_prefetch(soon + offset);
        __builtin_prefetch(later + offset, 0, 2);
    }
};

// Returns the addresses of a chunk's tiles, and of the tiles to prefetch while the chunk is read.
ENGINE_INLINE ChunkTiles tiles_of(const Queries& queries, int chunk) {
    const ChunkPlace place{queries.index, queries.kv_head, chunk};
    ChunkTiles tiles = find_tiles(*queries.job, place);
    find_next(*queries.job, place, tiles);
    return tiles;
}

// x = cap * tanh(x / cap)
ENGINE_INLINE Floats cap_scores(Floats x, float cap) {
    Floats power = vexp2((x < 0.0f ? -x : x) * (-2 * kLog2E / cap));
    Floats capped = (1.0f - power) / (1.0f + power) * cap;
    return x < 0.0f ? -capped : capped;
}

// Applies the soft cap and ALiBi to one query's scores, in place. Scores are in base 2, so the cap and the
// slope are multiplied by log2(e).
__attribute__((noinline)) void adjust_scores(const Queries& queries, int query, int chunk, float* scores) {
    const AttentionJob& job = *queries.job;
    const AttentionShape& shape = *job.shape;
    int token = queries.token(query);
    Range seen = visible_in_chunk(job, token, chunk);
    float slope = shape.slopes ? shape.slopes[queries.head(query)] * kLog2E : 0;
    Floats lane;
    for (int i = 0; i < kLanes; i++) lane[i] = float(i);
    for (int i = seen.begin / 16 * 16; i < seen.end; i += kLanes) {
        Floats score = load(scores + i);
        if (shape.softcap > 0) score = cap_scores(score, shape.softcap * kLog2E);
        int distance = job.batch->positions[token] - chunk * kChunk - i;
        store(scores + i, score - slope * (float(distance) - lane));
    }
}

// Replaces one query's scores over the tiles of a chunk by unnormalized softmax weights. Masked
// positions get weight 0. `max_sum` gets the max of the scores and the sum of the weights.
ENGINE_INLINE void softmax(float* scores, const ChunkTiles& tiles, Range seen, float* max_sum) {
    if (seen.empty()) {
        memset(scores + tiles.begin * 16, 0, size_t(tiles.end - tiles.begin) * 64);
        return;
    }
    int begin = seen.begin / 16 * 16, end = round_up(seen.end, 16);
    for (int i = begin; i < seen.begin; i++) scores[i] = -__builtin_inff();
    for (int i = seen.end; i < end; i++) scores[i] = -__builtin_inff();
    Floats lane_max = load(scores + begin);
    for (int i = begin + kLanes; i < end; i += kLanes) lane_max = vmax(lane_max, load(scores + i));
    float max = reduce_max(lane_max);
    Floats sums = {};
    for (int i = begin; i < end; i += 16) {  // one tile per iteration; its vectors are independent
        Floats weights[16 / kLanes];
        unroll<16 / kLanes>([&](auto v) __attribute__((always_inline)) {
            weights[v] = vexp2(load(scores + i + v * kLanes) - all(max));
        });
        for (int v = 0; v < 16 / kLanes; v++) {
            store(scores + i + v * kLanes, weights[v]);
            sums += weights[v];
        }
    }
    max_sum[0] = max;
    max_sum[1] = reduce_sum(sums);
    memset(scores + tiles.begin * 16, 0, size_t(begin - tiles.begin * 16) * sizeof(float));
    memset(scores + end, 0, size_t(tiles.end * 16 - end) * sizeof(float));
}

struct FloatScratch {
    float *queries, *state, *state_max_sum, *sums, *scores;
    size_t floats;
};

ENGINE_INLINE FloatScratch float_scratch(const AttentionShape& shape, uint8_t* base) {
    size_t dim = size_t(round_up(shape.head_dim, 32)), value_dim = size_t(shape.padded_value_dim());
    size_t max_count = size_t(max_queries(shape));
    float* at = reinterpret_cast<float*>(base);
    FloatScratch scratch;
    scratch.queries = at;
    scratch.state = scratch.queries + max_count * dim;
    scratch.state_max_sum = scratch.state + max_count * value_dim;
    scratch.sums = scratch.state_max_sum + 2 * max_count;
    scratch.scores = scratch.sums + kBatch * value_dim;
    scratch.floats = size_t(scratch.scores + kBatch * kChunk - at);
    return scratch;
}

ENGINE_INLINE size_t float_scratch_bytes(const AttentionShape& shape) {
    return float_scratch(shape, nullptr).floats * sizeof(float);
}

ENGINE_INLINE void scale_queries(const Queries& queries, float* scaled) {
    const AttentionShape& shape = *queries.job->shape;
    int dim = queries.job->cache->dim();
    float factor = shape.scale * kLog2E;
    for (int query = 0; query < queries.count; query++, scaled += dim) {
        const float* from = queries.floats(query);
        for (int i = 0; i < shape.head_dim; i++) scaled[i] = from[i] * factor;
        for (int i = shape.head_dim; i < dim; i++) scaled[i] = 0;
    }
}

}  // namespace
}  // namespace engine
