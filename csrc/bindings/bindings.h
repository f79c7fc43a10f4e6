// The parts of the Python module, one file each.
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

// The kernel table of that name. Raises ValueError if this CPU has none.
const Kernels& kernels_named(const std::string& name);

void bind_matmul(nb::module_& module);
void bind_vector(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_repack(nb::module_& module);
void bind_sampler(nb::module_& module);
void bind_model(nb::module_& module);

}  // namespace engine
