// Binds norms, RoPE, soft cap, embedding lookup and reductions over logits, for tests and benchmarks. Each
// call handles one row.
#include <nanobind/stl/optional.h>

#include "bindings/bindings.h"

namespace engine {
namespace {

using Row = Array<float, 1>;
using ConstRow = Array<const float, 1>;

int size_of(const ConstRow& row) {
    return int(row.shape(0));
}

void embed(const std::string& isa, const Array<const uint8_t, 1>& data, int layout, int rows, int index,
           Row out) {
    require(layout >= 0 && layout <= int(Layout::F32), "no such layout");
    Matrix table{Layout(layout), rows, int(out.shape(0)), data.data()};
    require(data.shape(0) >= table.bytes() && index >= 0 && index < rows, "the table is too small");
    kernels_named(isa).embed(table, index, out.data());
}

void rms_norm(const std::string& isa, const ConstRow& x, const ConstRow& weight, float eps, Row out) {
    require(size_of(x) == size_of(weight) && x.shape(0) == out.shape(0), "sizes differ");
    kernels_named(isa).rms_norm(x.data(), weight.data(), eps, size_of(x), out.data());
}

void layer_norm(const std::string& isa, const ConstRow& x, const ConstRow& weight,
                std::optional<ConstRow> bias, float eps, Row out) {
    require(size_of(x) == size_of(weight) && x.shape(0) == out.shape(0), "sizes differ");
    require(!bias || size_of(*bias) == size_of(x), "sizes differ");
    const float* shift = bias ? bias->data() : nullptr;
    kernels_named(isa).layer_norm(x.data(), weight.data(), shift, eps, size_of(x), out.data());
}

void rope(const std::string& isa, Array<float, 2> x, const ConstRow& cosines, const ConstRow& sines) {
    int heads = int(x.shape(0)), head_dim = int(x.shape(1)), dim = 2 * size_of(cosines);
    require(size_of(cosines) == size_of(sines) && dim <= head_dim, "sizes differ");
    kernels_named(isa).rope(x.data(), heads, head_dim, dim, cosines.data(), sines.data());
}

}  // namespace

void bind_vector(nb::module_& module) {
    module.def("embed", embed);
    module.def("rms_norm", rms_norm);
    module.def("layer_norm", layer_norm, nb::arg("isa"), nb::arg("x"), nb::arg("weight"),
               nb::arg("bias").none(), nb::arg("eps"), nb::arg("out"));
    module.def("rope", rope);
    module.def("softcap", [](const std::string& isa, Row x, float cap) {
        kernels_named(isa).softcap(x.data(), int(x.shape(0)), cap);
    });
    module.def("argmax", [](const std::string& isa, const ConstRow& x) {
        return kernels_named(isa).argmax(x.data(), size_of(x));
    });
    module.def("max", [](const std::string& isa, const ConstRow& x) {
        return kernels_named(isa).max(x.data(), size_of(x));
    });
    module.def("sum_exp", [](const std::string& isa, const ConstRow& x, float max, float scale) {
        return kernels_named(isa).sum_exp(x.data(), size_of(x), max, scale);
    });
    module.def("all_finite", [](const std::string& isa, const ConstRow& x) {
        return kernels_named(isa).all_finite(x.data(), size_of(x));
    });
}

}  // namespace engine
