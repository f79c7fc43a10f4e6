#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>

#include "bindings/bindings.h"
#include "repack/lora.h"
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

// A weight: (A, B, room for B).
using LoraArgument = std::tuple<Array<const float, 2>, Array<const float, 2>, Array<uint8_t, 1>>;
// A matmul: (columns, weights, room for A).
using LoraSiteArgument = std::tuple<int, std::vector<LoraArgument>, Array<uint8_t, 1>>;

LoraSite read_site(const LoraSiteArgument& argument) {
    const auto& [columns, weights, room] = argument;
    require(columns > 0 && columns % kGroup == 0, "columns must be whole groups");
    LoraSite site{columns, {}, room.data()};
    size_t ranks = 0;
    for (const auto& [a, b, out] : weights) {
        require(a.shape(0) == b.shape(1) && a.shape(1) == size_t(columns) && a.shape(0) > 0 &&
                    a.shape(0) < 1 << 16 && b.shape(0) < 1 << 30,
                "the matrices of an adapter that do not fit each other");
        site.parts.push_back({a.data(), b.data(), int(a.shape(0)), int(b.shape(0)), out.data()});
        const size_t panels = (b.shape(0) + kPanelRows - 1) / kPanelRows;
        require(out.size() == panels * size_t(expanding_bytes(int(a.shape(0)))), "the room for B");
        ranks += a.shape(0);
    }
    require(room.size() == (ranks + kPanelRows - 1) / kPanelRows * panel_bytes(Layout::Q8, columns),
            "the room for A");
    return site;
}

void pack_all_lora(const std::vector<LoraSiteArgument>& arguments) {
    std::vector<LoraSite> sites;
    for (const LoraSiteArgument& argument : arguments) sites.push_back(read_site(argument));
    nb::gil_scoped_release release;
    for (const LoraSite& site : sites) pack_lora(site);
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
    module.def("pack_lora", pack_all_lora, nb::arg("sites"),
               "Fill the 8-bit panels of adapters: (columns, parts, out) with parts (A, B, out).");
    module.def("repack", repack_all, nb::arg("matrices"), nb::arg("threads"),
               "Fill the panels of (layout, columns, interleaved, parts, out) matrices from stored parts: "
               "(type, bytes, rows, order or None, transposed). Returns the index of a matrix with a "
               "scale that is not finite or above 65504, or None.");
}

}  // namespace engine
