// Byte offsets of one token's keys and values inside a tile of the KV cache. `KvCache` describes
// the layout.
#pragma once
#include "base/kernels.h"

namespace engine {
namespace {

ENGINE_INLINE size_t value_bytes(KvType type) {
    return type == KvType::F32 ? 4 : type == KvType::BF16 ? 2 : 1;
}

ENGINE_INLINE size_t key_offset(KvType type, int lane, int column) {
    int packed = type == KvType::F32 ? 1 : type == KvType::BF16 ? 2 : 4;  // a token's adjacent dimensions
    return size_t((column / packed * 16 + lane) * packed + column % packed) * value_bytes(type);
}

ENGINE_INLINE size_t value_offset(KvType type, int dim, int lane, int column) {
    int packed = type == KvType::F32 ? 1 : type == KvType::BF16 ? 2 : 4;  // a dimension's adjacent tokens
    return size_t((lane / packed * dim + column) * packed + lane % packed) * value_bytes(type);
}

// Address of the int8 scale of the token in lane `lane` of a key tile or value tile.
ENGINE_INLINE float* scale_at(uint8_t* tile, int dim, int lane) {
    return reinterpret_cast<float*>(tile + size_t(dim) * 16) + lane;
}

struct TokenPlace {
    int64_t block;
    int tile, lane;
};

ENGINE_INLINE TokenPlace place_of(const KvCache& cache, int64_t slot) {
    int offset = int(slot % cache.block_size);
    return {slot / cache.block_size, offset / 16, offset % 16};
}

}  // namespace
}  // namespace engine
