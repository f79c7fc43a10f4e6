// Prefill attention over a bfloat16 KV cache with AMX tiles. A tile multiply of QK takes 16 queries
// and 16 keys. A tile multiply of PV takes the softmax weights of 16 queries and 16 columns of
// values.
//
// A key tile of the cache can be loaded as the B operand of a tile multiply without conversion. Two
// value tiles together form one B operand. Queries and softmax weights are rounded to bfloat16;
// accumulators are float. Decode tokens and other cache types use the float kernels.
#include "attention/attention_float.h"
#include "base/amx.h"
#include "base/dispatch.h"

namespace engine {
namespace {

constexpr int kRows = 32;                // max queries whose scores are in memory together: two tiles
constexpr int kStride = kChunk + 16;     // floats between the scores of two queries
constexpr int kPairs = kChunkTiles / 2;  // max pairs of tiles in a chunk; a pair has 32 positions

struct TileScratch {
    uint16_t* queries;  // [16 queries][dim / 32] tiles of [16][32]
    float *state, *state_max_sum;
    float* scores;    // [kRows][kStride]; bfloat16 softmax weights overwrite the scores
    float* sums;      // [kRows][dim]
    uint8_t* values;  // [kPairs][16 token pairs][dim][2]: copies of value tiles that are not adjacent
    size_t bytes;
};

TileScratch tile_scratch(const AttentionShape& shape, uint8_t* base) {
    size_t dim = size_t(round_up(shape.head_dim, 32)), max_count = size_t(round_up(max_queries(shape), 16));
    TileScratch scratch;
    scratch.queries = reinterpret_cast<uint16_t*>(base);
    scratch.scores = reinterpret_cast<float*>(scratch.queries + max_count * dim);
    scratch.sums = scratch.scores + kRows * kStride;
    scratch.state = scratch.sums + kRows * dim;
    scratch.state_max_sum = scratch.state + max_count * dim;
    scratch.values = reinterpret_cast<uint8_t*>(scratch.state_max_sum + 2 * max_count);
    scratch.bytes = size_t(scratch.values + kPairs * dim * 64 - base);
    return scratch;
}

ENGINE_INLINE __m512i to_bf16(Floats low, Floats high) {
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

// Scales the queries, rounds them to bfloat16 and stores them as tiles. Rows past the last query are zero.
void pack_queries(const Queries& queries, uint16_t* packed) {
    const AttentionShape& shape = *queries.job->shape;
    int dim = queries.job->cache->dim();
    const float factor = shape.scale * kLog2E;
    for (int row = 0; row < round_up(queries.count, 16); row++) {
        const float* from = row < queries.count ? queries.floats(row) : nullptr;
        for (int column = 0; column < dim; column += 32) {
            int left = from ? shape.head_dim - column : 0;
            __mmask32 present = left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0;
            Floats low = (Floats)_mm512_maskz_loadu_ps(__mmask16(present), from + column);
            Floats high = (Floats)_mm512_maskz_loadu_ps(__mmask16(present >> 16), from + column + 16);
            uint16_t* to = packed + (row / 16 * (dim / 32) + column / 32) * 512 + row % 16 * 32;
            _mm512_store_si512(to, to_bf16(low * factor, high * factor));
        }
    }
}

// The tiles of a chunk in pairs. In the first and the last pair, one tile may be outside the visible range
// and belong to another sequence. The visible tile of the pair then stands in for it, with softmax weights of
// zero.
struct TilePairs {
    const uint8_t *even_keys[kPairs], *odd_keys[kPairs], *values[kPairs];
    int begin, end;
};

ENGINE_INLINE const uint8_t* join_values(const uint8_t* even, const uint8_t* odd, size_t bytes,
                                         uint8_t* joined) {
    if (odd == even + bytes) return even;
    memcpy(joined, even, bytes);
    memcpy(joined + bytes, odd, bytes);
    return joined;
}

TilePairs pair_tiles(const ChunkTiles& tiles, int dim, uint8_t* joined) {
    TilePairs pairs;
    size_t bytes = size_t(dim) * 32;
    pairs.begin = tiles.begin / 2;
    pairs.end = div_up(tiles.end, 2);
    for (int pair = pairs.begin; pair < pairs.end; pair++) {
        int even = 2 * pair < tiles.begin ? tiles.begin : 2 * pair;
        int odd = 2 * pair + 1 >= tiles.end ? even : 2 * pair + 1;
        pairs.even_keys[pair] = tiles.keys[even];
        pairs.odd_keys[pair] = tiles.keys[odd];
        pairs.values[pair] =
            join_values(tiles.values[even], tiles.values[odd], bytes, joined + size_t(pair) * 2 * bytes);
    }
    return pairs;
}

// Loads A tiles 4 and 5 (queries or softmax weights) and B tiles 6 and 7 (keys or values), and adds
// their four products to accumulator tiles 0-3. If the template argument `tiles` is 1, tile 5 is
// not used.
template <int tiles>
ENGINE_INLINE void multiply(const void* left, size_t left_stride, size_t next_left, const void* right_0,
                            const void* right_1, size_t right_stride) {
    tile_load<6>(right_0, right_stride);
    tile_load<4>(left, left_stride);
    tile_multiply_bf16<0, 4, 6>();
    tile_load<7>(right_1, right_stride);
    tile_multiply_bf16<1, 4, 7>();
    if constexpr (tiles == 2) {
        tile_load<5>(static_cast<const uint8_t*>(left) + next_left, left_stride);
        tile_multiply_bf16<2, 5, 6>();
        tile_multiply_bf16<3, 5, 7>();
    }
}

template <int tiles>
ENGINE_INLINE void zero_accumulators() {
    tile_zero<0>();
    tile_zero<1>();
    if constexpr (tiles == 2) {
        tile_zero<2>();
        tile_zero<3>();
    }
}

// Stores the accumulators. The two column tiles are side by side in memory, and the second query
// tile is 16 rows below the first.
template <int tiles>
ENGINE_INLINE void store_accumulators(float* to, size_t stride) {
    tile_store<0>(to, stride * sizeof(float));
    tile_store<1>(to + 16, stride * sizeof(float));
    if constexpr (tiles == 2) {
        tile_store<2>(to + 16 * stride, stride * sizeof(float));
        tile_store<3>(to + 16 * stride + 16, stride * sizeof(float));
    }
}

template <int tiles>
ENGINE_INLINE void score_pairs(const TilePairs& pairs, const uint16_t* queries, int dim, float* scores) {
    for (int pair = pairs.begin; pair < pairs.end; pair++) {
        zero_accumulators<tiles>();
        for (int k = 0; k < dim / 32; k++)
            multiply<tiles>(queries + k * 512, 64, size_t(dim) * 32, pairs.even_keys[pair] + k * 1024,
                            pairs.odd_keys[pair] + k * 1024, 64);
        store_accumulators<tiles>(scores + pair * 32, kStride);
    }
}

template <int tiles>
ENGINE_INLINE void accumulate_pairs(const TilePairs& pairs, const float* weights, int dim, float* sums) {
    for (int column = 0; column < dim; column += 32) {
        zero_accumulators<tiles>();
        for (int pair = pairs.begin; pair < pairs.end; pair++) {
            const uint8_t* values = pairs.values[pair] + column * 4;
            multiply<tiles>(weights + pair * 16, kStride * 4, 16 * kStride * 4, values, values + 64,
                            size_t(dim) * 4);
        }
        store_accumulators<tiles>(sums + column, size_t(dim));
    }
}

// exp2 with a relative error of 3e-6, enough for a result that is rounded to bfloat16. See vexp2.
ENGINE_INLINE Floats exp2_bf16(Floats x) {
    Floats r = (Floats)_mm512_maskz_reduce_ps(0xffff, (__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const float coefficients[] = {1.0f, 6.930448445e-1f, 2.412802068e-1f, 5.224247137e-2f, 1.342668553e-2f};
    Floats p = polynomial(r, coefficients);
    return (Floats)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)x);
}

ENGINE_INLINE void mask_positions(float* scores, int position, Range seen) {
    int before = seen.begin - position, until = seen.end - position;
    uint32_t hidden = 0;
    if (before > 0) hidden |= before < 16 ? (1u << before) - 1 : 0xffff;
    if (until < 16) hidden |= until > 0 ? 0xffff << until : 0xffff;
    const __m512 never = _mm512_set1_ps(-__builtin_inff());
    if (hidden) _mm512_mask_storeu_ps(scores + position, __mmask16(hidden), never);
}

// Replaces one query's scores over a chunk by unnormalized softmax weights in bfloat16. `max_sum`
// gets the max of the scores and the sum of the weights.
ENGINE_INLINE void softmax_pairs(float* scores, const TilePairs& pairs, Range seen, float* max_sum) {
    uint16_t* weights = reinterpret_cast<uint16_t*>(scores);
    int begin = seen.begin / 32, end = seen.empty() ? begin : div_up(seen.end, 32);
    if (!seen.empty()) {
        for (int half = 0; half < 32; half += 16) {
            mask_positions(scores, begin * 32 + half, seen);
            mask_positions(scores, (end - 1) * 32 + half, seen);
        }
        Floats low_max = load(scores + begin * 32), high_max = load(scores + begin * 32 + 16);
        for (int pair = begin + 1; pair < end; pair++) {
            low_max = vmax(low_max, load(scores + pair * 32));
            high_max = vmax(high_max, load(scores + pair * 32 + 16));
        }
        max_sum[0] = reduce_max(vmax(low_max, high_max));
        const Floats max = all(max_sum[0]);
        Floats low_sum = {}, high_sum = {};
        for (int pair = begin; pair < end; pair++) {
            Floats low = exp2_bf16(load(scores + pair * 32) - max);
            Floats high = exp2_bf16(load(scores + pair * 32 + 16) - max);
            low_sum += low;
            high_sum += high;
            _mm512_storeu_si512(weights + pair * 32, to_bf16(low, high));
        }
        max_sum[1] = reduce_sum(low_sum + high_sum);
    }
    for (int pair = pairs.begin; pair < pairs.end; pair++)
        if (pair < begin || pair >= end) _mm512_storeu_si512(weights + pair * 32, _mm512_setzero_si512());
}

template <int tiles>
void attend_rows(const Queries& queries, int begin, int chunk, const TilePairs& pairs,
                 const TileScratch& scratch) {
    int dim = queries.job->cache->dim();
    int count = queries.count - begin < tiles * 16 ? queries.count - begin : tiles * 16;
    score_pairs<tiles>(pairs, scratch.queries + begin * dim, dim, scratch.scores);
    float max_sum[2 * kRows];
    for (int i = 0; i < count; i++) {
        Range seen = visible_in_chunk(*queries.job, queries.token(begin + i), chunk);
        float* scores = scratch.scores + i * kStride;
        if (queries.job->shape->adjusts_scores()) adjust_scores(queries, begin + i, chunk, scores);
        softmax_pairs(scores, pairs, seen, max_sum + 2 * i);
    }
    float* sums = queries.result_buffer(begin, chunk, scratch.sums);
    accumulate_pairs<tiles>(pairs, scratch.scores, dim, sums);
    for (int i = 0; i < count; i++) queries.add(begin + i, chunk, {sums + i * dim, max_sum + 2 * i});
}

void attend_tiles(const AttentionJob& job, int index, int kv_head, uint8_t* base) {
    const AttentionItem& item = job.batch->items[index];
    if (!item.is_prefill || job.cache->type != KvType::BF16 || job.cache->latent > 0)
        return attend_float(job, index, kv_head, base);
    TileScratch scratch = tile_scratch(*job.shape, base);
    Queries queries = item_queries(job, index, kv_head);
    queries.state = scratch.state;
    queries.state_max_sum = scratch.state_max_sum;
    pack_queries(queries, scratch.queries);
    TileScope scope;
    for (int chunk = item.chunk; chunk < item.chunk + item.chunks; chunk++) {
        ChunkTiles tiles = find_tiles(job, {index, kv_head, chunk});
        TilePairs pairs = pair_tiles(tiles, job.cache->dim(), scratch.values);
        int begin = 0;
        for (; begin + 16 < queries.count; begin += kRows)
            attend_rows<2>(queries, begin, chunk, pairs, scratch);
        if (begin < queries.count) attend_rows<1>(queries, begin, chunk, pairs, scratch);
    }
    queries.write_out();
}

size_t attend_scratch_bytes(const AttentionShape& shape) {
    size_t tiles = tile_scratch(shape, nullptr).bytes, floats = float_scratch_bytes(shape);
    return tiles > floats ? tiles : floats;
}

}  // namespace

void fill_attention_amx(Kernels& table) {
    table.attend = attend_tiles;
    table.attend_scratch_bytes = attend_scratch_bytes;
    table.prefers_int8_cache = false;  // prefill attention has tiles for BF16 only
}

}  // namespace engine
