// Compile-time loop unrolling.
#pragma once
#include <utility>

#include "base/common.h"

#define ALWAYS __attribute__((always_inline))

namespace engine {
namespace {

// `unroll<count>(f)` calls f(0), f(1), ..., f(count - 1). The arguments are compile-time constants,
// so the compiler can keep arrays that f indexes in registers.
template <int... i, class F>
ENGINE_INLINE void for_each(std::integer_sequence<int, i...>, F&& f) {
    (f(std::integral_constant<int, i>()), ...);
}
template <int count, class F>
ENGINE_INLINE void unroll(F&& f) {
    for_each(std::make_integer_sequence<int, count>(), f);
}

}  // namespace
}  // namespace engine
