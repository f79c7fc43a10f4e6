// Binds `set_adapter`: the matrices of a LoRA adapter, which Python has packed into panels.
#include <algorithm>

#include "bindings/bound_model.h"

namespace engine {
namespace {

constexpr int kMaxAdapters = 1024;

// (layout, rows, columns, panels)
using PackedArgument = std::tuple<int, int, int, Array<const uint8_t, 1>>;
// (the values of all panels; RankPanel of each panel; whether the values are bytes rather than floats)
using ExpandArgument = std::tuple<Array<const uint8_t, 1>, Array<const int32_t, 2>, bool>;
// (site, A, B, numerics of A x)
using SiteArgument = std::tuple<int, PackedArgument, ExpandArgument, int>;
// (A, one row per token; B, one row per rank)
using EmbeddingArgument = std::tuple<Array<const float, 2>, Array<const float, 2>>;
// Matrices that take the place of the model's: the table of embeddings; the head and its numerics.
using WholeArgument =
    std::tuple<std::optional<Array<const float, 2>>, std::optional<std::tuple<PackedArgument, int>>>;

Matrix read_matrix(const PackedArgument& argument) {
    const auto& [layout, rows, columns, data] = argument;
    Matrix matrix{Layout(layout), rows, columns, data.data()};
    if (layout < 0 || layout > int(Layout::F32) || rows < 1 || columns < 1 || data.shape(0) < matrix.bytes())
        throw nb::value_error("a matrix that its bytes do not hold");
    if (reinterpret_cast<uintptr_t>(data.data()) % 64)
        throw nb::value_error("a matrix must be 64-byte aligned");
    return matrix;
}

// Sets B of `matrices`, whose A is set already, for a matmul with `num_panels` panels.
void read_expansion(const ExpandArgument& argument, int num_panels, AdapterMatrices& matrices) {
    const auto& [values, panels, is_bytes] = argument;
    const size_t size = values.shape(0) / (is_bytes ? 1 : sizeof(float));
    if (panels.shape(0) != size_t(num_panels) || panels.shape(1) != 4)
        throw nb::value_error("an adapter's matrices that do not fit the matmul");
    if (reinterpret_cast<uintptr_t>(values.data()) % 64)
        throw nb::value_error("a matrix must be 64-byte aligned");
    matrices.panels = reinterpret_cast<const RankPanel*>(panels.data());
    for (int i = 0; i < num_panels; i++) {
        const RankPanel& panel = matrices.panels[i];
        const bool is_inside = panel.first >= 0 && panel.count >= 0 && panel.offset >= 0 &&
                               panel.group >= 0 && panel.group <= panel.first &&
                               (!is_bytes || panel.offset % 64 == 0) &&
                               int64_t(panel.first) + panel.count <= matrices.a.rows;
        const int values_of = is_bytes ? panel.bytes() : panel.count * kPanelRows;
        if (!is_inside || size_t(panel.offset) + size_t(values_of) > size)
            throw nb::value_error("a panel that is outside its matrix");
        auto& parts = matrices.parts;
        const bool is_known = std::any_of(parts.begin(), parts.end(), [&](const RankPanel& each) {
            return each.first == panel.first && each.count == panel.count && each.group == panel.group;
        });
        if (is_bytes && panel.count > 0 && !is_known) parts.push_back(panel);
    }
    std::sort(matrices.parts.begin(), matrices.parts.end(),
              [](const RankPanel& one, const RankPanel& other) { return one.group < other.group; });
    if (is_bytes)
        matrices.bytes = values.data();
    else
        matrices.floats = reinterpret_cast<const float*>(values.data());
}

// The ops of all programs have the same sites, so the sites of one program are enough.
const Op& op_at(const Executor& executor, int site) {
    for (const Op& op : executor.program(1).ops)
        if (op.site == site) return op;
    throw nb::value_error("an adapter for a matmul that is not there");
}

Numerics read_numerics(int number) {
    if (Numerics(number) != Numerics::F32 && Numerics(number) != Numerics::INT8)
        throw nb::value_error("adapters compute in F32 or INT8");
    return Numerics(number);
}

void read_whole(const Executor& executor, const WholeArgument& argument, LoadedAdapter& adapter) {
    const auto& [table, head] = argument;
    const Program& program = executor.program(1);
    if (table) {
        const Matrix& own = *program.ops[0].matrix;
        if (table->shape(0) != size_t(own.rows) || table->shape(1) != size_t(own.columns))
            throw nb::value_error("an adapter's embeddings that do not fit the model");
        adapter.embedding.table = table->data();
    }
    if (head) {
        const Op& op = program.ops.back();
        AdapterMatrices& matrices = adapter.sites[size_t(op.site)];
        const Numerics numerics = read_numerics(std::get<1>(*head));
        matrices.whole = read_matrix(std::get<0>(*head));
        const bool fits =
            matrices.whole.rows == op.matrix->rows && matrices.whole.columns == op.matrix->columns;
        if (!fits || is_apart(op) || (matrices.has_ranks() && matrices.numerics != numerics))
            throw nb::value_error("an adapter's head that does not fit the model");
        matrices.numerics = numerics;
    }
}

LoadedAdapter read_adapter(const Executor& executor, const std::vector<SiteArgument>& sites,
                           const std::optional<EmbeddingArgument>& embedding) {
    LoadedAdapter adapter;
    adapter.is_loaded = true;
    for (const Op& op : executor.program(1).ops)
        if (op.site >= int(adapter.sites.size())) adapter.sites.resize(size_t(op.site) + 1);
    for (const auto& [site, a, b, numerics] : sites) {
        const Op& op = op_at(executor, site);
        AdapterMatrices matrices{read_matrix(a), read_numerics(numerics)};
        if (matrices.a.columns != op.matrix->columns)
            throw nb::value_error("an adapter's matrices that do not fit the matmul");
        read_expansion(b, op.units() * (op.gated ? 2 : 1), matrices);
        adapter.sites[size_t(site)] = std::move(matrices);
    }
    if (embedding) {
        const auto& [a, b] = *embedding;
        const Matrix& table = *executor.program(1).ops[0].matrix;
        if (a.shape(0) != size_t(table.rows) || b.shape(1) != size_t(table.columns) ||
            a.shape(1) != b.shape(0))
            throw nb::value_error("an adapter's matrices that do not fit the embeddings");
        adapter.embedding = {int(a.shape(1)), a.data(), b.data()};
    }
    return adapter;
}

}  // namespace

void bind_adapters(nb::class_<BoundModel>& model) {
    model.def(
        "set_adapter",
        [](BoundModel& self, int index, const std::vector<SiteArgument>& sites,
           std::optional<EmbeddingArgument> embedding, const WholeArgument& whole) {
            if (index < 1 || index > kMaxAdapters) throw nb::value_error("adapters are numbered from 1");
            LoadedAdapter adapter = read_adapter(self.model.executor, sites, embedding);
            read_whole(self.model.executor, whole, adapter);
            nb::object arrays = nb::make_tuple(nb::cast(sites), nb::cast(embedding), nb::cast(whole));
            self.model.executor.set_adapter(index, std::move(adapter));
            self.keep_adapter(index, std::move(arrays));
        },
        nb::arg("index"), nb::arg("sites"), nb::arg("embedding").none(), nb::arg("whole"));
}

}  // namespace engine
