#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>

#include "bindings/bindings.h"
#include "repack/repack.h"

namespace engine {

namespace {

// The argument for one stored tensor: (type, bytes, rows, order of the rows or None, whether it is
// transposed).
using Order = std::optional<Array<const int64_t, 1>>;
using PartArgument = std::tuple<std::string, Array<const uint8_t, 1>, int, Order, bool>;
// The argument for one matrix to pack: (layout, columns, whether the panels of two parts are
// interleaved, parts, output bytes).
using MatrixArgument = std::tuple<int, int, bool, std::vector<PartArgument>, Array<uint8_t, 1>>;

const StoredType& type_named(const std::string& name) {
    const StoredType* type = stored_type(name);
    if (!type) throw nb::value_error(("there are no panels for the storage type '" + name + "'").c_str());
    return *type;
}

Layout layout_numbered(int number) {
    require(number >= 0 && number <= int(Layout::F32), "there is no such layout");
    return Layout(number);
}

StoredPart read_part(const PartArgument& argument, Layout layout, int columns) {
    const auto& [name, data, rows, order, transposed] = argument;
    const StoredType& type = type_named(name);
    require(type.layout == layout, "a part's storage type belongs to another layout");
    require(rows > 0, "a part must have rows");
    require(columns % type.block_values == 0, "rows must be whole blocks");
    require(data.size() == type.bytes(size_t(rows) * size_t(columns)),
            "a part's bytes do not match its shape");
    require(!transposed || type.block_values == 1, "only floats can be stored transposed");
    require(!order || order->size() == size_t(rows), "an order must name as many rows as there are");
    for (size_t i = 0; order && i < order->size(); i++)
        require(order->data()[i] >= 0 && order->data()[i] < rows, "an order names a row that is not there");
    return {&type, data.data(), rows, order ? order->data() : nullptr, transposed};
}

Repacking read_matrix(const MatrixArgument& argument) {
    const auto& [number, columns, interleaved, parts, out] = argument;
    require(columns > 0 && !parts.empty(), "a matrix must have columns and parts");
    Repacking matrix{layout_numbered(number), columns, interleaved, {}, out.data()};
    int64_t rows = 0;
    for (const PartArgument& part : parts) {
        matrix.parts.push_back(read_part(part, matrix.layout, columns));
        rows += matrix.parts.back().rows;
    }
    require(rows <= std::numeric_limits<int>::max() - 64, "a matrix has too many rows");
    if (interleaved)
        require(parts.size() == 2 && matrix.parts[0].rows == matrix.parts[1].rows,
                "two parts of as many rows can be interleaved");
    require(out.size() == matrix.bytes(), "the room for the panels has another size");
    return matrix;
}

std::optional<int> repack_all(const std::vector<MatrixArgument>& arguments, int threads) {
    std::vector<Repacking> matrices;
    for (const MatrixArgument& argument : arguments) matrices.push_back(read_matrix(argument));
    nb::gil_scoped_release release;
    int refused = repack(matrices, threads);
    return refused >= 0 ? std::optional<int>(refused) : std::nullopt;
}

}  // namespace

void bind_repack(nb::module_& module) {
    module.attr("LAYOUT_VERSION") = kLayoutVersion;
    module.def(
        "layout_of", [](const std::string& type) { return int(type_named(type).layout); },
        nb::arg("stored_type"), "The layout that panels of a storage type have.");
    module.def(
        "panel_bytes",
        [](int layout, int columns) {
            require(columns > 0, "a panel must have columns");
            return panel_bytes(layout_numbered(layout), columns);
        },
        nb::arg("layout"), nb::arg("columns"));
    module.def(
        "per_channel_panel_bytes", [](int columns) { return panel_bytes(Layout::I8, columns); },
        nb::arg("columns"), "Of a panel of int8 weights with one scale per output channel.");
    module.def("repack", repack_all, nb::arg("matrices"), nb::arg("threads"),
               "Fill the panels of (layout, columns, interleaved, parts, out) matrices from stored parts: "
               "(type, bytes, rows, order or None, transposed). Returns the index of a matrix with a "
               "scale that is not finite or above 65504, or None.");
}

}  // namespace engine
