// Writes to a bfloat16 KV cache with the bfloat16 conversions of AVX-512.
#include <immintrin.h>

#include "attention/attention_cache.h"
#include "base/dispatch.h"

namespace engine {
namespace {

ENGINE_INLINE __m512 load_some(const float* from, int count) {
    __mmask16 present = count >= 16 ? 0xffff : count > 0 ? __mmask16((1 << count) - 1) : 0;
    return _mm512_maskz_loadu_ps(present, from);
}

// Writes the keys of one token as bfloat16. Dimensions 2 i and 2 i + 1 are adjacent in row i of the tile.
ENGINE_INLINE void write_keys(uint8_t* tile, int lane, const float* keys, int size) {
    const __m512i rows = _mm512_slli_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 4);  // in 4-byte words
    for (int column = 0; column < size; column += 32) {
        __m512 low = load_some(keys + column, size - column);
        __m512 high = load_some(keys + column + 16, size - column - 16);
        __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        _mm512_i32scatter_epi32(tile + column * 32 + lane * 4, rows, pairs, 4);
    }
}

// Writes the values of one token as bfloat16. The values of two tokens are interleaved in memory,
// and another thread may write the other token at the same time, so the store is masked.
ENGINE_INLINE void write_values(uint8_t* tile, int dim, int lane, const float* values, int size) {
    const __mmask32 own = lane % 2 ? 0xaaaaaaaa : 0x55555555;
    for (int column = 0; column < size; column += 16) {
        __m256i rounded = (__m256i)_mm512_cvtneps_pbh(load_some(values + column, size - column));
        __m512i words = _mm512_maskz_cvtepu16_epi32(0xffff, rounded);
        __m512i both = _mm512_or_si512(words, _mm512_maskz_slli_epi32(0xffff, words, 16));
        _mm512_mask_storeu_epi16(tile + (lane / 2 * dim + column) * 4, own, both);
    }
}

void write_kv(const KvCache& cache, int layer, int64_t slot, const float* keys, const float* values) {
    TokenPlace place = place_of(cache, slot);
    int size = cache.head_dim;
    for (int head = 0; head < cache.kv_heads; head++, keys += size, values += size) {
        write_keys(cache.key_tile(layer, place.block, head, place.tile), place.lane, keys, size);
        uint8_t* tile = cache.value_tile(layer, place.block, head, place.tile);
        write_values(tile, cache.dim(), place.lane, values, size);
    }
}

void (*write_any)(const KvCache&, int, int64_t, const float*, const float*);

void write_bf16_or_any(const KvCache& cache, int layer, int64_t slot, const float* keys,
                       const float* values) {
    bool is_fast = cache.type == KvType::BF16 && cache.latent == 0;
    (is_fast ? write_kv : write_any)(cache, layer, slot, keys, values);
}

}  // namespace

void fill_attention_avx512bf16(Kernels& table) {
    write_any = table.write_kv;
    table.write_kv = write_bf16_or_any;
}

}  // namespace engine
