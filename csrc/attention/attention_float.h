// Attention in float arithmetic, for every type of KV cache. Each including file is compiled for
// one instruction set, which sets the vector width.
//
// In QK (queries times keys), the vector lanes are the 16 tokens of a tile. In PV (softmax weights
// times values), they are head dimensions. Every query goes through the same operations in the same
// order, so its result does not depend on the queries that are computed with it.
#pragma once
#include "attention/attention_softmax.h"

namespace engine {
namespace {

constexpr int kMaxConvertedDim =
    256;  // max head dimension for which key tiles are converted to float on the stack

// Loads dimensions [column, column + 4) of the keys of tokens [lane, lane + kLanes). INT8 keys are not scaled
// yet.
template <KvType type>
ENGINE_INLINE void load_keys(const uint8_t* tile, int column, int lane, Floats (&keys)[4]) {
    if constexpr (type == KvType::F32) {
        const float* from = reinterpret_cast<const float*>(tile) + column * 16 + lane;
        for (int i = 0; i < 4; i++) keys[i] = load(from + 16 * i);
    } else if constexpr (type == KvType::BF16) {
        for (int i = 0; i < 4; i += 2)
            widen_bf16_pairs(tile + (column + i) * 32 + lane * 4, keys[i], keys[i + 1]);
    } else {
        Words words = load_words(tile + column * 16 + lane * 4);
        for (int i = 0; i < 4; i++)
            keys[i] = __builtin_convertvector((Ints)(words << (24 - 8 * i)) >> 24, Floats);
    }
}

// Loads dimensions [column, column + kLanes) of the values of tokens 2 * pair and 2 * pair + 1. INT8 values
// are not scaled yet.
template <KvType type>
ENGINE_INLINE void load_values(const uint8_t* tile, int dim, int pair, int column, Floats& even,
                               Floats& odd) {
    if constexpr (type == KvType::F32) {
        const float* from = reinterpret_cast<const float*>(tile) + 2 * pair * dim + column;
        even = load(from);
        odd = load(from + dim);
    } else if constexpr (type == KvType::BF16) {
        widen_bf16_pairs(tile + (pair * dim + column) * 4, even, odd);
    } else {
        Words words = load_words(tile + (pair / 2 * dim + column) * 4) << (pair % 2 ? 0 : 16);
        even = __builtin_convertvector((Ints)(words << 8) >> 24, Floats);
        odd = __builtin_convertvector((Ints)words >> 24, Floats);
    }
}

constexpr int four_columns_bytes(KvType type) {
    return type == KvType::F32 ? 256 : type == KvType::BF16 ? 128 : 64;
}

// QK: computes scores[query][0:16] of `N` queries for the 16 tokens of one tile.
template <KvType type, int N>
ENGINE_INLINE void score_tile(const uint8_t* tile, Prefetch prefetch, const float* queries, int dim,
                              float* scores) {
    constexpr int kBytes = four_columns_bytes(type);
    for (int lane = 0; lane < 16; lane += kLanes) {
        Floats even[N] = {}, odd[N] = {};
        for (int column = 0; column < dim; column += 4) {
            if (lane == 0)
                for (int i = 0; i < kBytes; i += 64) prefetch.at(column / 4 * kBytes + i);
            Floats keys[4];
            load_keys<type>(tile, column, lane, keys);
            unroll<N>([&](auto n) __attribute__((always_inline)) {
                const float* query = queries + n * dim + column;
                even[n] = vfma_lane<4, 0>(keys[0], query, even[n]);
                odd[n] = vfma_lane<4, 1>(keys[1], query, odd[n]);
                even[n] = vfma_lane<4, 2>(keys[2], query, even[n]);
                odd[n] = vfma_lane<4, 3>(keys[3], query, odd[n]);
            });
        }
        unroll<N>([&](auto n) __attribute__((always_inline)) {
            store(scores + n * kChunk + lane, even[n] + odd[n]);
        });
    }
}

template <KvType type, int N>
void score_queries(const uint8_t* tile, Prefetch prefetch, const float* queries, int count, int dim,
                   float* scores) {
    for (; count >= N; count -= N, queries += N * dim, scores += N * kChunk)
        score_tile<type, N>(tile, prefetch, queries, dim, scores);
    if constexpr (N > 1)
        if (count > 0) score_queries<type, N - 1>(tile, prefetch, queries, count, dim, scores);
}

// Converts a tile of keys to the F32 layout. INT8 keys are not scaled.
template <KvType type>
void convert_key_tile(const uint8_t* tile, Prefetch prefetch, int dim, float* out) {
    constexpr int kBytes = four_columns_bytes(type);
    for (int column = 0; column < dim; column += 4) {
        for (int i = 0; i < kBytes; i += 64) prefetch.at(column / 4 * kBytes + i);
        for (int lane = 0; lane < 16; lane += kLanes) {
            Floats keys[4];
            load_keys<type>(tile, column, lane, keys);
            for (int i = 0; i < 4; i++) store(out + (column + i) * 16 + lane, keys[i]);
        }
    }
}

// QK: computes scores[query][0:16] of `count` queries for the 16 tokens of one tile.
template <KvType type>
void score_batch(const uint8_t* tile, Prefetch prefetch, const float* queries, int count, int dim,
                 float* scores) {
    if (kConvertsOnce && type != KvType::F32 && count > kQueries && dim <= kMaxConvertedDim) {
        float converted[16 * kMaxConvertedDim];
        convert_key_tile<type>(tile, prefetch, dim, converted);
        score_queries<KvType::F32, kQueries>(reinterpret_cast<const uint8_t*>(converted), {nullptr, nullptr},
                                             queries, count, dim, scores);
    } else {
        score_queries<type, kQueries>(tile, prefetch, queries, count, dim, scores);
    }
    if constexpr (type == KvType::INT8) {
        const float* scales = reinterpret_cast<const float*>(tile + dim * 16);
        for (int n = 0; n < count; n++)
            for (int lane = 0; lane < 16; lane += kLanes) {
                float* score = scores + n * kChunk + lane;
                store(score, load(score) * load(scales + lane));
            }
    }
}

constexpr int value_pair_bytes(KvType type) {  // bytes that one dimension of two tokens takes
    return type == KvType::F32 ? 8 : type == KvType::BF16 ? 4 : 2;
}

// PV: computes sums[query][column : column + C * kLanes] of `N` queries over the tiles of a chunk.
template <KvType type, int N, int C>
ENGINE_INLINE void accumulate_columns(const ChunkTiles& tiles, const float* weights, int dim, int column,
                                      float* sums) {
    constexpr int kBytes = value_pair_bytes(type);
    Floats sum[N][C] = {};
    for (int tile = tiles.begin; tile < tiles.end; tile++) {
        const uint8_t* values = tiles.values[tile];
        const Prefetch prefetch{tiles.values[tile + kPrefetchTiles], tiles.next_values[tile]};
        for (int pair = 0; pair < 8; pair++) {
            const float* weight = weights + tile * 16 + pair * 2;
            for (int i = 0; i < C * kLanes * kBytes; i += 64) prefetch.at((pair * dim + column) * kBytes + i);
            unroll<C>([&](auto c) __attribute__((always_inline)) {
                Floats even, odd;
                load_values<type>(values, dim, pair, column + c * kLanes, even, odd);
                unroll<N>([&](auto n) __attribute__((always_inline)) {
                    sum[n][c] = vfma_lane<2, 0>(even, weight + n * kChunk, sum[n][c]);
                    sum[n][c] = vfma_lane<2, 1>(odd, weight + n * kChunk, sum[n][c]);
                });
            });
        }
    }
    unroll<N * C>([&](auto i) __attribute__((always_inline)) {
        store(sums + i / C * dim + column + i % C * kLanes, sum[i / C][i % C]);
    });
}

// Converts dimensions [column, column + kColumns * kLanes) of the values of a chunk to float. The output has
// one row per position.
template <KvType type>
void convert_columns(const ChunkTiles& tiles, int dim, int column, float* out) {
    constexpr int kWidth = kColumns * kLanes;
    for (int tile = tiles.begin; tile < tiles.end; tile++) {
        const Prefetch prefetch{tiles.values[tile + kPrefetchTiles], tiles.next_values[tile]};
        for (int pair = 0; pair < 8; pair++, out += 2 * kWidth) {
            for (int i = 0; i < kWidth * value_pair_bytes(type); i += 64)
                prefetch.at((pair * dim + column) * value_pair_bytes(type) + i);
            for (int i = 0; i < kWidth; i += kLanes) {
                Floats even, odd;
                load_values<type>(tiles.values[tile], dim, pair, column + i, even, odd);
                store(out + i, even);
                store(out + kWidth + i, odd);
            }
        }
    }
}

// PV: computes sums[query][0 : C * kLanes] of `count` queries, N at a time, over 4 * `fours` positions whose
// values were converted to float.
template <int N, int C>
void accumulate_converted(const float* values, int fours, const float* weights, int count, int dim,
                          float* sums) {
    constexpr int kSums = N * C, kWidth = C * kLanes;
    for (; count >= N; count -= N, weights += N * kChunk, sums += N * dim) {
        Floats sum[kSums] = {};
        const float* from = values;
        for (int four = 0; four < fours; four++, from += 4 * kWidth)
            unroll<4 * kSums>([&](auto i) __attribute__((always_inline)) {
                constexpr int position = i / kSums, n = i % kSums / C, c = i % C;
                sum[i % kSums] = vfma_lane<4, position>(load(from + position * kWidth + c * kLanes),
                                                        weights + n * kChunk + four * 4, sum[i % kSums]);
            });
        unroll<kSums>([&](auto i) __attribute__((always_inline)) {
            store(sums + i / C * dim + i % C * kLanes, sum[i]);
        });
    }
    if constexpr (N > 1)
        if (count > 0) accumulate_converted<N - 1, C>(values, fours, weights, count, dim, sums);
}

// Converts dimensions [column, column + width) of the keys of a chunk to float. The output has one row per
// position, so the tiles are transposed.
template <KvType type>
void convert_latents(const ChunkTiles& tiles, int column, int width, float* out) {
    for (int tile = tiles.begin; tile < tiles.end; tile++, out += 16 * width)
        for (int i = 0; i < width; i += 4)
            for (int lane = 0; lane < 16; lane += kLanes) {
                Floats keys[4];
                load_keys<type>(tiles.keys[tile], column + i, lane, keys);
                for (int token = 0; token < kLanes; token++)
                    for (int c = 0; c < 4; c++) out[(lane + token) * width + i + c] = keys[c][token];
            }
}

// PV of a cache without values: computes sums[query][0:dim] of `count` queries over the tiles of a chunk.
template <KvType type>
void accumulate_latents(const ChunkTiles& tiles, const float* weights, int count, int dim, float* sums) {
    constexpr int kWidth = 2 * kLanes;  // divides 32, and so `dim`
    float converted[kChunk * kWidth];
    for (int column = 0; column < dim; column += kWidth) {
        convert_latents<type>(tiles, column, kWidth, converted);
        accumulate_converted<kQueriesConverted, 2>(converted, (tiles.end - tiles.begin) * 4,
                                                   weights + tiles.begin * 16, count, dim, sums + column);
    }
}

template <KvType type, int N>
void accumulate_queries(const ChunkTiles& tiles, const float* weights, int count, int dim, float* sums) {
    for (; count >= N; count -= N, weights += N * kChunk, sums += N * dim) {
        int column = 0;
        for (; column + kColumns * kLanes <= dim; column += kColumns * kLanes)
            accumulate_columns<type, N, kColumns>(tiles, weights, dim, column, sums);
        for (; column < dim; column += 2 * kLanes)
            accumulate_columns<type, N, 2>(tiles, weights, dim, column, sums);
    }
    if constexpr (N > 1)
        if (count > 0) accumulate_queries<type, N - 1>(tiles, weights, count, dim, sums);
}

// PV: computes sums[query][0:dim] of `count` queries over the tiles of a chunk.
template <KvType type>
void accumulate_batch(const ChunkTiles& tiles, const float* weights, int count, int dim, float* sums) {
    constexpr int kWidth = kColumns * kLanes;
    if (!kConvertsOnce || count <= kQueries)
        return accumulate_queries<type, kQueries>(tiles, weights, count, dim, sums);
    float converted[kChunk * kWidth];
    for (int column = 0; column < dim; column += kWidth) {
        convert_columns<type>(tiles, dim, column, converted);
        accumulate_converted<kQueriesConverted, kColumns>(
            converted, (tiles.end - tiles.begin) * 4, weights + tiles.begin * 16, count, dim, sums + column);
    }
}

ENGINE_INLINE void scale_weights(float* weights, const ChunkTiles& tiles, int dim) {
    for (int tile = tiles.begin; tile < tiles.end; tile++) {
        const float* scales = reinterpret_cast<const float*>(tiles.values[tile] + dim * 16);
        for (int i = 0; i < 16; i += kLanes)
            store(weights + tile * 16 + i, load(weights + tile * 16 + i) * load(scales + i));
    }
}

template <KvType type>
void attend_chunk(const Queries& queries, int chunk, const FloatScratch& scratch) {
    const AttentionJob& job = *queries.job;
    int dim = job.cache->dim(), value_dim = job.shape->padded_value_dim();
    ChunkTiles tiles = tiles_of(queries, chunk);
    for (int begin = 0; begin < queries.count; begin += kBatch) {
        int count = queries.count - begin < kBatch ? queries.count - begin : kBatch;
        const float* scaled = scratch.queries + begin * dim;
        for (int tile = tiles.begin; tile < tiles.end; tile++)
            score_batch<type>(tiles.keys[tile], {tiles.keys[tile + kPrefetchTiles], tiles.next_keys[tile]},
                              scaled, count, dim, scratch.scores + tile * 16);
        float max_sum[2 * kBatch];
        for (int i = 0; i < count; i++) {
            float* scores = scratch.scores + i * kChunk;
            Range seen = visible_in_chunk(job, queries.token(begin + i), chunk);
            if (job.shape->adjusts_scores()) adjust_scores(queries, begin + i, chunk, scores);
            softmax(scores, tiles, seen, max_sum + 2 * i);
            if constexpr (type == KvType::INT8) scale_weights(scores, tiles, dim);
        }
        float* sums = queries.result_buffer(begin, chunk, scratch.sums);
        if (job.cache->latent > 0)
            accumulate_latents<type>(tiles, scratch.scores, count, value_dim, sums);
        else
            accumulate_batch<type>(tiles, scratch.scores, count, value_dim, sums);
        for (int i = 0; i < count; i++)
            queries.add(begin + i, chunk, {sums + i * value_dim, max_sum + 2 * i});
    }
}

template <KvType type>
void attend_item(const Queries& queries, const FloatScratch& scratch) {
    const AttentionItem& item = *queries.item;
    for (int i = 0; i < item.chunks; i++) attend_chunk<type>(queries, item.chunk + i, scratch);
    queries.write_out();
}

void attend_float(const AttentionJob& job, int index, int kv_head, uint8_t* base) {
    FloatScratch scratch = float_scratch(*job.shape, base);
    Queries queries = item_queries(job, index, kv_head);
    queries.state = scratch.state;
    queries.state_max_sum = scratch.state_max_sum;
    scale_queries(queries, scratch.queries);
    switch (job.cache->type) {
        case KvType::F32:
            return attend_item<KvType::F32>(queries, scratch);
        case KvType::BF16:
            return attend_item<KvType::BF16>(queries, scratch);
        case KvType::INT8:
            return attend_item<KvType::INT8>(queries, scratch);
    }
}

}  // namespace
}  // namespace engine
