// Elementary functions on vectors of floats.
#pragma once
#include "vector/vectors.h"

namespace engine {
namespace {

// exp(x) with an error of at most 2 ulp. The result is 0 if x is below -87.3, and it never exceeds
// 2.4e38. NaN gives NaN.
ENGINE_INLINE Floats vexp(Floats x) {
    const Floats lowest = all(-87.3f), highest = all(88.37f);
    Floats bounded = x < lowest ? lowest : x;
    bounded = bounded > highest ? highest : bounded;
    Floats shifted = bounded * 1.44269504f + kRoundShift;
    Floats integer = shifted - kRoundShift;
    Floats r = bounded - integer * 0.693359375f;
    r = r + integer * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    Ints power = ((Ints)shifted - kRoundShiftBits + 127) << 23;
    Floats result = p * (Floats)power;
    return x < lowest ? Floats{} : result;
}

}  // namespace
}  // namespace engine
