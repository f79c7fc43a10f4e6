// Portable attention kernels, and writes to the KV cache.
#include "attention/attention_cache.h"
#include "attention/attention_float.h"
#include "base/dispatch.h"

namespace engine {
namespace {

struct Int8Scale {
    float scale, inverse;
};

// Returns the int8 scale for the keys or values of one head of one token. The largest magnitude
// maps to 127. If a value is NaN or infinite, the scale is NaN, so that the results of the step are
// detected as non-finite.
Int8Scale find_int8_scale(const float* x, int size) {
    float absmax = 0;
    bool finite = true;
    for (int i = 0; i < size; i++) {
        float magnitude = __builtin_fabsf(x[i]);
        finite &= magnitude <= __FLT_MAX__;
        absmax = magnitude > absmax ? magnitude : absmax;
    }
    if (!finite) return {__builtin_nanf(""), 0.0f};
    return {absmax / 127.0f, absmax > 1e-30f ? 127.0f / absmax : 0.0f};
}

ENGINE_INLINE void write_value(KvType type, uint8_t* to, float value, Int8Scale int8_scale) {
    if (type == KvType::F32) {
        memcpy(to, &value, sizeof value);
    } else if (type == KvType::BF16) {
        uint16_t rounded = float_to_bf16(value);
        memcpy(to, &rounded, sizeof rounded);
    } else {
        float quantized = int8_scale.inverse == 0.0f ? 0.0f : value * int8_scale.inverse;
#if defined(__aarch64__)
        __asm__("" : "+w"(quantized));  // keeps the product and the addition below from becoming an FMA
#endif
        *to = uint8_t(float_to_bits(quantized + kRoundShift));
    }
}

template <KvType type>
void write_heads(const KvCache& cache, int layer, int64_t slot, const float* keys, const float* values) {
    TokenPlace place = place_of(cache, slot);
    int dim = cache.dim(), size = cache.head_dim;
    for (int head = 0; head < cache.kv_heads; head++) {
        uint8_t* key_tile = cache.key_tile(layer, place.block, head, place.tile);
        const float* key = keys + head * size;
        Int8Scale of_key{}, of_value{};
        if (type == KvType::INT8) {
            of_key = find_int8_scale(key, size);
            *scale_at(key_tile, dim, place.lane) = of_key.scale;
        }
        for (int i = 0; i < size; i++)
            write_value(type, key_tile + key_offset(type, place.lane, i), key[i], of_key);
        if (cache.latent > 0) continue;
        uint8_t* value_tile = cache.value_tile(layer, place.block, head, place.tile);
        const float* value = values + head * size;
        if (type == KvType::INT8) {
            of_value = find_int8_scale(value, size);
            *scale_at(value_tile, dim, place.lane) = of_value.scale;
        }
        for (int i = 0; i < size; i++)
            write_value(type, value_tile + value_offset(type, dim, place.lane, i), value[i], of_value);
    }
}

void write_kv(const KvCache& cache, int layer, int64_t slot, const float* keys, const float* values) {
    switch (cache.type) {
        case KvType::F32:
            return write_heads<KvType::F32>(cache, layer, slot, keys, values);
        case KvType::BF16:
            return write_heads<KvType::BF16>(cache, layer, slot, keys, values);
        case KvType::INT8:
            return write_heads<KvType::INT8>(cache, layer, slot, keys, values);
    }
}

size_t attend_scratch_bytes(const AttentionShape& shape) {
    return float_scratch_bytes(shape);
}

}  // namespace

void fill_attention_generic(Kernels& table) {
    table.write_kv = write_kv;
    table.attend = attend_float;
    table.merge = merge;
    table.attend_scratch_bytes = attend_scratch_bytes;
}

}  // namespace engine
