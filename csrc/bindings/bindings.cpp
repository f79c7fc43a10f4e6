// The Python module `_native`. Serving uses its class `Model`. Tests and micro-benchmarks also call
// single kernels.
#include "bindings/bindings.h"

#include <nanobind/stl/vector.h>

#include "base/dispatch.h"

namespace engine {

const Kernels& kernels_named(const std::string& name) {
    const KernelSet& set = kernel_set();
    for (int i = 0; i < set.count; i++)
        if (name == set.tables[i]->name) return *set.tables[i];
    throw nb::value_error(("this CPU has no instruction set '" + name + "'").c_str());
}

}  // namespace engine

NB_MODULE(_native, module) {
    using namespace engine;
    nb::set_leak_warnings(false);  // at exit, a model may outlive the interpreter
    module.def("instruction_sets", [] {
        std::vector<std::string> names;
        for (int i = 0; i < kernel_set().count; i++) names.emplace_back(kernel_set().tables[i]->name);
        return names;
    });
    module.attr("INTERFACE") = ENGINE_INTERFACE;
    bind_matmul(module);
    bind_vector(module);
    bind_attention(module);
    bind_repack(module);
    bind_sampler(module);
    bind_model(module);
}
