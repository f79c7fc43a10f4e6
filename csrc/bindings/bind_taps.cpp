// Binds the taps of a model: its sites, the taps of a step, and the LM head by itself.
#include "bindings/bound_model.h"

namespace engine {

TapArrays TapCall::read(nb::handle taps, std::optional<Array<float, 2>> out) {
    sites = nb::cast<Ints>(taps.attr("sites"));
    tokens = nb::cast<Ints>(taps.attr("tokens"));
    kinds = nb::cast<Ints>(taps.attr("kinds"));
    rows = nb::cast<Ints>(taps.attr("rows"));
    scales = nb::cast<Array<const float, 1>>(taps.attr("scales"));
    vectors = nb::cast<Embeds>(taps.attr("vectors"));
    captured = std::move(out);
    const size_t count = sites.shape(0);
    if (tokens.shape(0) != count || kinds.shape(0) != count || rows.shape(0) != count ||
        scales.shape(0) != count)
        throw nb::value_error("taps of a step that disagree in size");
    TapArrays arrays{int(count),           sites.data(),
                     tokens.data(),        kinds.data(),
                     rows.data(),          scales.data(),
                     vectors.data(),       int(vectors.shape(0)),
                     int(vectors.shape(1))};
    if (captured) {
        arrays.captured = captured->data();
        arrays.num_captured = int(captured->shape(0));
        arrays.captured_width = int(captured->shape(1));
    }
    return arrays;
}

void bind_taps(nb::class_<BoundModel>& model) {
    // Each site is an op, a point (see TapSite), a first column and a width.
    model.def("set_sites", [](BoundModel& self, const std::vector<std::tuple<int, int, int, int>>& sites) {
        std::vector<TapSite> all;
        const size_t ops = self.model.executor.program(1).ops.size();
        for (auto [op, point, column, width] : sites) {
            if (op < 0 || size_t(op) >= ops || point < 0 || point > int(TapSite::Point::PreActivation))
                throw nb::value_error("a site that is not in the program");
            all.push_back({op, TapSite::Point(point), column, width});
        }
        self.model.executor.set_sites(std::move(all));
    });
    model.def("unembed", [](BoundModel& self, Embeds x, Array<float, 2> out) {
        const Executor& executor = self.model.executor;
        if (x.shape(1) != size_t(self.model.hidden_size()) || x.shape(0) != out.shape(0) ||
            out.shape(1) != size_t(executor.width(self.model.output)))
            throw nb::value_error("a residual stream or logits of another size");
        nb::gil_scoped_release release;
        self.model.unembed(x.data(), int(x.shape(0)), out.data());
    });
    model.def("head_row", [](BoundModel& self, int token, Array<float, 1> out) {
        if (out.shape(0) != size_t(self.model.hidden_size()))
            throw nb::value_error("a row of another size");
        self.model.head_row(token, out.data());
    });
}

}  // namespace engine
