// Attention over an INT8 KV cache on Arm, with int8 dot products.
//
// Queries are quantized to 15 bits and softmax weights to 14 bits. Each is the sum of a high and a
// low 7-bit term. The rounding error is far below that of the INT8 cache. The accumulators are
// exact integers. Other cache types use the portable kernels.
#include <arm_neon.h>

#include "attention/attention_cache.h"
#include "attention/attention_softmax.h"
#include "base/dispatch.h"

namespace engine {
namespace {

// kScored, kAccumulated: how many queries have their accumulators in registers at the same time, in
// QK and in PV. kVectors: how many vectors of accumulators each query has in PV.
constexpr int kScored = 6, kAccumulated = 3, kVectors = 8;
constexpr float kMaxQuery = 127 * 128, kMaxWeight = 127 * 128 + 127;

decltype(Kernels::attend) attend_other;
decltype(Kernels::attend_scratch_bytes) other_scratch_bytes;
decltype(Kernels::write_kv) write_other;

struct Int8Scale {
    float scale, inverse;
};

// Returns the scale that maps the absmax to `max_quantized`. NaN or infinity gives a non-finite
// scale, so that the results of the step are detected as non-finite.
ENGINE_INLINE Int8Scale scale_to(float max_quantized, float absmax) {
    return {absmax / max_quantized, absmax > 1e-30f && absmax <= __FLT_MAX__ ? max_quantized / absmax : 0.0f};
}

ENGINE_INLINE int8x16_t narrowed(const int32x4_t (&x)[4]) {
    int16x8_t first = vuzp1q_s16(vreinterpretq_s16_s32(x[0]), vreinterpretq_s16_s32(x[1]));
    int16x8_t second = vuzp1q_s16(vreinterpretq_s16_s32(x[2]), vreinterpretq_s16_s32(x[3]));
    return vuzp1q_s8(vreinterpretq_s8_s16(first), vreinterpretq_s8_s16(second));
}

// Quantized queries or softmax weights, [query][size]: value = scale * (128 * high + low).
struct Terms {
    int8_t *high, *low;
    float* scales;
    int size;

    Terms from(int query) const { return {high + query * size, low + query * size, scales + query, size}; }
    void write(int at, const int32x4_t (&highs)[4], const int32x4_t (&lows)[4]) const {
        vst1q_s8(high + at, narrowed(highs));
        vst1q_s8(low + at, narrowed(lows));
    }
};

ENGINE_INLINE float reduce_max(const float* x, int size) {
    float32x4_t absmax = vdupq_n_f32(0);
    for (int i = 0; i < size; i += 4) absmax = vmaxq_f32(absmax, vabsq_f32(vld1q_f32(x + i)));
    return vmaxvq_f32(absmax);
}

void quantize_query(const float* query, const Terms& to) {
    Int8Scale int8_scale = scale_to(kMaxQuery, reduce_max(query, to.size));
    *to.scales = int8_scale.scale;
    for (int i = 0; i < to.size; i += 16) {
        int32x4_t highs[4], lows[4];
        for (int v = 0; v < 4; v++) {
            int32x4_t quantized =
                vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(query + i + 4 * v), int8_scale.inverse));
            highs[v] = vrshrq_n_s32(quantized, 7);
            lows[v] = vsubq_s32(quantized, vshlq_n_s32(highs[v], 7));
        }
        to.write(i, highs, lows);
    }
}

// Quantizes 16 values. Only the first `count` are read; if `count` is below 16, the others are
// zero.
ENGINE_INLINE int8x16_t quantize16(const float* x, int count, float inverse) {
    float padded[16] = {};
    if (count < 16) x = static_cast<const float*>(memcpy(padded, x, size_t(count) * sizeof(float)));
    int32x4_t quantized[4];
    for (int v = 0; v < 4; v++) quantized[v] = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 4 * v), inverse));
    return narrowed(quantized);
}

// Writes the keys and values of one token and kv head. In the key tile, the token's bytes are
// groups of four adjacent bytes. In the value tile, they are every fourth byte. Other threads may
// write the bytes in between at the same time, so only the token's own bytes are stored.
void write_head(const float* keys, const float* values, int size, int dim, int lane, uint8_t* key_tile,
                uint8_t* value_tile) {
    Int8Scale of_keys = scale_to(127, reduce_max(keys, size));
    Int8Scale of_values = scale_to(127, reduce_max(values, size));
    *scale_at(key_tile, dim, lane) = of_keys.scale;
    *scale_at(value_tile, dim, lane) = of_values.scale;
    for (int i = 0; i < size; i += 16) {
        int8x16_t key = quantize16(keys + i, size - i, of_keys.inverse);
        int8x16_t value = quantize16(values + i, size - i, of_values.inverse);
        auto* of_key = reinterpret_cast<int32_t*>(key_tile + key_offset(KvType::INT8, lane, i));
        auto* of_value = reinterpret_cast<int8_t*>(value_tile + value_offset(KvType::INT8, dim, lane, i));
        const int count = size - i < 16 ? size - i : 16;
        unroll<16>([&](auto j) __attribute__((always_inline)) {
            if (j >= count) return;
            if constexpr (j % 4 == 0) vst1q_lane_s32(of_key + j * 4, vreinterpretq_s32_s8(key), j / 4);
            vst1q_lane_s8(of_value + j * 4, value, j);
        });
    }
}

void write_kv(const KvCache& cache, int layer, int64_t slot, const float* keys, const float* values) {
    if (cache.type != KvType::INT8 || cache.head_dim % 4 || cache.latent > 0)
        return write_other(cache, layer, slot, keys, values);
    TokenPlace place = place_of(cache, slot);
    for (int head = 0; head < cache.kv_heads; head++)
        write_head(keys + head * cache.head_dim, values + head * cache.head_dim, cache.head_dim, cache.dim(),
                   place.lane, cache.key_tile(layer, place.block, head, place.tile),
                   cache.value_tile(layer, place.block, head, place.tile));
}

// Multiplies the softmax weights of one query by the int8 scales of the values, then quantizes the products.
void quantize_weights(float* weights, const ChunkTiles& tiles, int dim, const Terms& to) {
    float32x4_t absmax[4] = {};
    for (int tile = tiles.begin; tile < tiles.end; tile++) {
        const float* scales = reinterpret_cast<const float*>(tiles.values[tile] + dim * 16);
        for (int v = 0; v < 4; v++) {
            float* at = weights + tile * 16 + 4 * v;
            float32x4_t scaled = vmulq_f32(vld1q_f32(at), vld1q_f32(scales + 4 * v));
            vst1q_f32(at, scaled);
            absmax[v] = vmaxq_f32(absmax[v], scaled);
        }
    }
    float32x4_t lanes = vmaxq_f32(vmaxq_f32(absmax[0], absmax[1]), vmaxq_f32(absmax[2], absmax[3]));
    Int8Scale int8_scale = scale_to(kMaxWeight, vmaxvq_f32(lanes));
    *to.scales = int8_scale.scale;
    for (int i = tiles.begin * 16; i < tiles.end * 16; i += 16) {
        int32x4_t highs[4], lows[4];
        for (int v = 0; v < 4; v++) {
            int32x4_t quantized =
                vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(weights + i + 4 * v), int8_scale.inverse));
            highs[v] = vshrq_n_s32(quantized, 7);
            lows[v] = vandq_s32(quantized, vdupq_n_s32(127));
        }
        to.write(i, highs, lows);
    }
}

// `V` accumulator vectors for each of `N` queries. The high terms are accumulated first. Then the sums are
// shifted left by 7 bits, and the low terms are added. Separate accumulators for high and low terms would not
// fit into the registers.
template <int N, int V>
struct Sums {
    int32x4_t sums[N][V] = {};

    // Adds to vector `v` of each query the dot products of 16 bytes with four bytes of this query's
    // terms.
    template <int v, int FOUR>
    __attribute__((always_inline)) void add(int8x16_t bytes, const int8x16_t (&terms)[N]) {
        unroll<N>([&](auto n) __attribute__((always_inline)) {
            sums[n][v] = vdotq_laneq_s32(sums[n][v], bytes, terms[n], FOUR);
        });
    }
    __attribute__((always_inline)) void end_high() {
        unroll<N * V>([&](auto i) __attribute__((always_inline)) {
            sums[i / V][i % V] = vshlq_n_s32(sums[i / V][i % V], 7);
        });
    }
};

template <int N>
ENGINE_INLINE void load_terms(const int8_t* from, int stride, int8x16_t (&terms)[N]) {
    unroll<N>([&](auto n) __attribute__((always_inline)) { terms[n] = vld1q_s8(from + n * stride); });
}

// QK: computes scores[query][0:16] of N queries for the 16 tokens of one tile.
template <int N>
void score(const uint8_t* tile, Prefetch prefetch, const Terms& queries, float* scores) {
    const int8_t* keys = reinterpret_cast<const int8_t*>(tile);
    const float* scales = reinterpret_cast<const float*>(tile + queries.size * 16);
    Sums<N, 4> found;
    for (const int8_t* term : {queries.high, queries.low}) {
        if (term == queries.low) found.end_high();
        for (int column = 0; column < queries.size; column += 16) {
            int8x16_t terms[N];
            load_terms<N>(term + column, queries.size, terms);
            if (term == queries.high)
                for (int i = 0; i < 256; i += 64) prefetch.at(column * 16 + i);
            unroll<16>([&](auto i) __attribute__((always_inline)) {
                found.template add<i % 4, i / 4>(vld1q_s8(keys + column * 16 + i * 16), terms);
            });
        }
    }
    unroll<N * 4>([&](auto i) __attribute__((always_inline)) {
        constexpr int n = i / 4, v = i % 4;
        float32x4_t scale = vmulq_n_f32(vld1q_f32(scales + 4 * v), queries.scales[n]);
        vst1q_f32(scores + n * kChunk + 4 * v, vmulq_f32(vcvtq_f32_s32(found.sums[n][v]), scale));
    });
}

// PV: computes results[query][column : column + 4 * kVectors] of N queries over the tiles of a chunk.
template <int N>
void accumulate(const ChunkTiles& tiles, const Terms& weights, int dim, int column, float* results) {
    Sums<N, kVectors> found;
    for (const int8_t* term : {weights.high, weights.low}) {
        if (term == weights.low) found.end_high();
        for (int tile = tiles.begin; tile < tiles.end; tile++) {
            const int8_t* values = reinterpret_cast<const int8_t*>(tiles.values[tile]) + column * 4;
            const Prefetch prefetch{tiles.values[tile + kPrefetchTiles], tiles.next_values[tile]};
            int8x16_t terms[N];
            load_terms<N>(term + tile * 16, weights.size, terms);
            if (term == weights.high)
                for (int i = 0; i < 8; i++) prefetch.at((i / 2 * dim + column) * 4 + i % 2 * 64);
            unroll<4 * kVectors>([&](auto i) __attribute__((always_inline)) {
                constexpr int four = i / kVectors, v = i % kVectors;
                found.template add<v, four>(vld1q_s8(values + four * dim * 4 + v * 16), terms);
            });
        }
    }
    unroll<N * kVectors>([&](auto i) __attribute__((always_inline)) {
        constexpr int n = i / kVectors, v = i % kVectors;
        float32x4_t sums = vcvtq_f32_s32(found.sums[n][v]);
        vst1q_f32(results + n * dim + column + 4 * v, vmulq_n_f32(sums, weights.scales[n]));
    });
}

// Calls f for blocks of N queries, then for the remaining queries in smaller blocks.
template <int N, class F>
ENGINE_INLINE void by_blocks(int count, int first, F&& f) {
    for (; count - first >= N; first += N) f(std::integral_constant<int, N>(), first);
    if constexpr (N > 1)
        if (count > first) by_blocks<N - 1>(count, first, f);
}

struct Int8Scratch {
    FloatScratch floats;
    Terms queries, weights;
    size_t bytes;
};

Int8Scratch int8_scratch(const AttentionShape& shape, uint8_t* base) {
    int dim = round_up(shape.head_dim, 32);
    size_t max_count = size_t(max_queries(shape)), all_queries = max_count * size_t(dim),
           all_weights = kBatch * kChunk;
    FloatScratch floats = float_scratch(shape, base);
    float* scales = reinterpret_cast<float*>(base) + floats.floats;
    int8_t* at = reinterpret_cast<int8_t*>(scales + max_count + kBatch);
    Terms queries{at, at + all_queries, scales, dim};
    at += 2 * all_queries;
    Terms weights{at, at + all_weights, scales + max_count, kChunk};
    return {floats, queries, weights, size_t(at + 2 * all_weights - reinterpret_cast<int8_t*>(base))};
}

size_t scratch_bytes(const AttentionShape& shape) {
    size_t int8 = int8_scratch(shape, nullptr).bytes, other = other_scratch_bytes(shape);
    return int8 > other ? int8 : other;
}

void attend_chunk(const Queries& queries, int chunk, const Int8Scratch& scratch) {
    const AttentionJob& job = *queries.job;
    int dim = job.cache->dim();
    ChunkTiles tiles = tiles_of(queries, chunk);
    for (int begin = 0; begin < queries.count; begin += kBatch) {
        int count = queries.count - begin < kBatch ? queries.count - begin : kBatch;
        float *scores = scratch.floats.scores, max_sum[2 * kBatch];
        for (int tile = tiles.begin; tile < tiles.end; tile++) {
            const Prefetch prefetch{tiles.keys[tile + kPrefetchTiles], tiles.next_keys[tile]};
            by_blocks<kScored>(count, 0, [&](auto n, int first) __attribute__((always_inline)) {
                score<n>(tiles.keys[tile], prefetch, scratch.queries.from(begin + first),
                         scores + first * kChunk + tile * 16);
            });
        }
        for (int i = 0; i < count; i++) {
            Range seen = visible_in_chunk(job, queries.token(begin + i), chunk);
            if (job.shape->adjusts_scores()) adjust_scores(queries, begin + i, chunk, scores + i * kChunk);
            softmax(scores + i * kChunk, tiles, seen, max_sum + 2 * i);
            quantize_weights(scores + i * kChunk, tiles, dim, scratch.weights.from(i));
        }
        float* results = queries.result_buffer(begin, chunk, scratch.floats.sums);
        for (int column = 0; column < dim; column += 4 * kVectors)
            by_blocks<kAccumulated>(count, 0, [&](auto n, int first) __attribute__((always_inline)) {
                accumulate<n>(tiles, scratch.weights.from(first), dim, column, results + first * dim);
            });
        for (int i = 0; i < count; i++) queries.add(begin + i, chunk, {results + i * dim, max_sum + 2 * i});
    }
}

void attend(const AttentionJob& job, int index, int kv_head, uint8_t* base) {
    if (job.cache->type != KvType::INT8 || job.cache->latent > 0)
        return attend_other(job, index, kv_head, base);
    Int8Scratch scratch = int8_scratch(*job.shape, base);
    Queries queries = item_queries(job, index, kv_head);
    queries.state = scratch.floats.state;
    queries.state_max_sum = scratch.floats.state_max_sum;
    scale_queries(queries, scratch.floats.queries);
    for (int i = 0; i < queries.count; i++)
        quantize_query(scratch.floats.queries + i * job.cache->dim(), scratch.queries.from(i));
    const AttentionItem& item = *queries.item;
    for (int i = 0; i < item.chunks; i++) attend_chunk(queries, item.chunk + i, scratch);
    queries.write_out();
}

}  // namespace

void fill_attention_neon(Kernels& table) {
    attend_other = table.attend;
    other_scratch_bytes = table.attend_scratch_bytes;
    write_other = table.write_kv;
    table.has_int8_attention = table.prefers_int8_cache = true;
    table.write_kv = write_kv;
    table.attend = attend;
    table.attend_scratch_bytes = scratch_bytes;
}

}  // namespace engine
