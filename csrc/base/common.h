// Helpers that every file uses. They are `static` functions or macros, so each file has its own
// copy. This matters because files are compiled for different instruction sets. If a helper were a
// shared `inline` function, the linker would keep only one compiled copy of it, and this copy might
// use instructions that the CPU does not have.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#define ENGINE_INLINE static inline __attribute__((always_inline))

namespace engine {

ENGINE_INLINE constexpr int div_up(int a, int b) {
    return (a + b - 1) / b;
}
ENGINE_INLINE int round_up(int a, int b) {
    return div_up(a, b) * b;
}
ENGINE_INLINE size_t round_up_size(size_t a, size_t b) {
    return (a + b - 1) / b * b;
}

// kRoundShift is 1.5 * 2^23. Adding it to a float rounds the float to the nearest integer, ties to even, and
// leaves this integer in the low mantissa bits. Conversely, kRoundShiftBits + integer, read as a float, is
// kRoundShift + integer.
constexpr float kRoundShift = 12582912.0f;
constexpr int32_t kRoundShiftBits = 0x4b400000;

ENGINE_INLINE float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

ENGINE_INLINE uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

ENGINE_INLINE float bf16_to_float(uint16_t value) {
    return bits_to_float(uint32_t(value) << 16);
}

// Converts a float to bfloat16. Rounds to nearest, ties to even. NaN stays NaN.
ENGINE_INLINE uint16_t float_to_bf16(float value) {
    uint32_t bits = float_to_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

ENGINE_INLINE float half_to_float(uint16_t half) {
    uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 0x1f, mantissa = half & 0x3ff;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) {
        float magnitude = float(mantissa) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

// Converts a float to a half (float16). Rounds to nearest, ties to even. Values beyond the half
// range become infinity. NaN stays NaN.
ENGINE_INLINE uint16_t float_to_half(float value) {
    uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (bits >= 0x47800000) return uint16_t(sign | 0x7c00);
    if (bits < 0x38800000) {  // the result is a subnormal half; adding 0.5 rounds it
        float shifted = bits_to_float(bits) + 0.5f;
        return uint16_t(sign | (float_to_bits(shifted) - 0x3f000000));
    }
    uint32_t rounded = bits + 0xfff + (bits >> 13 & 1) - (112u << 23);
    return uint16_t(sign | (rounded >> 13));
}

}  // namespace engine
