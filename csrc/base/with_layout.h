// Turns a weight layout that is known only at run time into a template argument. Kernels are
// compiled separately for each layout.
#pragma once
#include <type_traits>

#include "base/layout.h"

namespace engine {
namespace {

// Calls f with `layout` as a compile-time constant. Does nothing for layout I8, which has its own
// kernels in per_channel/.
template <class F>
ENGINE_INLINE void with_layout(Layout layout, F f) {
    switch (layout) {
        case Layout::Q4:
            return f(std::integral_constant<Layout, Layout::Q4>());
        case Layout::Q4G16:
            return f(std::integral_constant<Layout, Layout::Q4G16>());
        case Layout::Q8:
            return f(std::integral_constant<Layout, Layout::Q8>());
        case Layout::Q8M:
            return f(std::integral_constant<Layout, Layout::Q8M>());
        case Layout::Q8G16:
            return f(std::integral_constant<Layout, Layout::Q8G16>());
        case Layout::F16:
            return f(std::integral_constant<Layout, Layout::F16>());
        case Layout::BF16:
            return f(std::integral_constant<Layout, Layout::BF16>());
        case Layout::F32:
            return f(std::integral_constant<Layout, Layout::F32>());
        case Layout::I8:
            return;
    }
}

}  // namespace
}  // namespace engine
