// Compile-time loop unrolling.
#pragma once
#include <utility>

#include "base/common.h"

#define ALWAYS __attribute__((always_inline))

namespace engine {
namespace {

// Calls f with 0, 1, ... as integral constants. Arrays that f indexes with them can stay in registers.
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
