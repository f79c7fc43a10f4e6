// Loops that the compiler must unroll.
#pragma once
#include <utility>

#include "base/common.h"

#define ALWAYS __attribute__((always_inline))

namespace engine {
namespace {

// f(0), f(1) ... as constants: an array so indexed stays in registers.
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
