// Vectors of floats and integers. Each including file is compiled for one instruction set, which
// sets the vector width. The types are GCC vector extensions, so the same source works for every
// instruction set.
#pragma once
#include "base/common.h"

namespace engine {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

ENGINE_INLINE Floats load(const float* from) {
    Floats value;
    memcpy(&value, from, sizeof value);
    return value;
}

ENGINE_INLINE void store(float* to, Floats value) {
    memcpy(to, &value, sizeof value);
}

ENGINE_INLINE Words load_words(const uint8_t* from) {
    Words words;
    memcpy(&words, from, sizeof words);
    return words;
}

ENGINE_INLINE Floats all(float value) {
    return value - Floats{};
}

}  // namespace
}  // namespace engine
