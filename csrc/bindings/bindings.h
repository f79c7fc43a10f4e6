// Declarations that all bindings share. Each part of the Python module `_native` has one file of
// bindings.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "base/kernels.h"

namespace engine {

namespace nb = nanobind;

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

inline void require(bool holds, const char* message) {
    if (!holds) throw nb::value_error(message);
}

// Returns the kernel table with this name. Raises ValueError if this CPU has no such table.
const Kernels& kernels_named(const std::string& name);

void bind_matmul(nb::module_& module);
void bind_vector(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_repack(nb::module_& module);
void bind_sampler(nb::module_& module);
void bind_model(nb::module_& module);

}  // namespace engine
