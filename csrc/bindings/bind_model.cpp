// Binds `Model`: its weights, its memory, and the two halves of a step, `forward` and `sample`.
#include "bindings/bound_model.h"

namespace engine {
namespace {

void bind_memory(nb::class_<BoundModel>& model) {
    model.def("add_matrix", &BoundModel::add_matrix);
    model.def("add_per_channel", &BoundModel::add_per_channel);
    model.def("add_vector", &BoundModel::add_vector);
    model.def("set_arena", [](BoundModel& self, const std::vector<std::tuple<int, bool>>& places,
                              const std::vector<std::tuple<int, int>>& buffers, int max_tokens,
                              int max_logits, int output) {
        ArenaShape shape;
        for (auto [width, over_logits] : places) shape.places.push_back({width, over_logits});
        for (auto [place, width] : buffers) shape.buffers.push_back({place, width});
        shape.max_tokens = max_tokens;
        shape.max_logits = max_logits;
        self.model.executor.set_arena(std::move(shape));
        self.model.output = output;
    });
    model.def("set_cache", [](BoundModel& self, int index, int type, int layers, int kv_heads, int head_dim,
                              int block_size, int64_t blocks, int latent) {
        if (block_size % 16) throw nb::value_error("block_size must be a multiple of 16");
        if (index < 0 || index > 1) throw nb::value_error("a model has at most two KV caches");
        self.model.executor.set_cache(
            index, KvCache{KvType(type), layers, kv_heads, head_dim, block_size, blocks, nullptr, latent});
    });
    model.def("set_states", [](BoundModel& self, size_t floats, int count) {
        self.model.executor.set_states(floats, count);
    });
    model.def("set_max_positions", [](BoundModel& self, int count) { self.model.max_positions = count; });
    model.def("set_fast", [](BoundModel& self, bool on) { self.model.executor.set_fast(on); });
    model.def("add_rope", [](BoundModel& self, std::vector<float> frequencies, float scale) {
        self.model.executor.add_rope(std::move(frequencies), scale);
    });
}

void check_blocks(const Executor& executor, int group, const Longs& blocks, size_t rows, size_t width) {
    if (group < 0 || group > 2 || rows != blocks.shape(0) || width != executor.bytes_per_block(group))
        throw nb::value_error("bytes that are not those of the blocks");
    for (size_t i = 0; i < rows; i++)
        if (blocks.data()[i] < 0 || blocks.data()[i] >= executor.num_blocks(group))
            throw nb::value_error("no such block");
}

// Copies blocks between the model's memory and host bytes, for the tiers of the prefix cache.
void bind_blocks(nb::class_<BoundModel>& model) {
    model.def("bytes_per_block", [](BoundModel& self, int group) {
        require(group >= 0 && group <= 2, "no such group of blocks");
        return self.model.executor.bytes_per_block(group);
    });
    model.def("read_blocks", [](BoundModel& self, int group, Longs blocks, Array<uint8_t, 2> out) {
        check_blocks(self.model.executor, group, blocks, out.shape(0), out.shape(1));
        nb::gil_scoped_release release;
        for (size_t i = 0; i < out.shape(0); i++)
            self.model.executor.read_block(group, blocks.data()[i], out.data() + i * out.shape(1));
    });
    model.def("write_blocks", [](BoundModel& self, int group, Longs blocks, Array<const uint8_t, 2> in) {
        check_blocks(self.model.executor, group, blocks, in.shape(0), in.shape(1));
        nb::gil_scoped_release release;
        for (size_t i = 0; i < in.shape(0); i++)
            self.model.executor.write_block(group, blocks.data()[i], in.data() + i * in.shape(1));
    });
}

// Collects the arrays of one step, which Python owns, and checks that their sizes match.
StepArrays step_arrays(Ints token_ids, Ints positions, Longs write_slots, Ints query_start, Ints num_prompt,
                       Tables tables, Ints logit_rows, Ints prefix_groups, Ints prefix_blocks,
                       const std::optional<Longs>& window_slots, const std::optional<Tables>& window_tables,
                       const std::optional<Ints>& visible_end, const std::optional<Ints>& token_types,
                       const std::optional<Ints>& slots, const std::optional<Ints>& load,
                       const std::optional<Ints>& save, const std::optional<Embeds>& embeds,
                       const std::optional<Ints>& embed_rows, const std::optional<Ints>& adapter_ids,
                       int width) {
    if (embeds.has_value() != embed_rows.has_value() ||
        (embeds && (embeds->shape(0) != embed_rows->shape(0) || embeds->shape(1) != size_t(width))))
        throw nb::value_error("embeddings of a step that disagree in size");
    size_t tokens = token_ids.shape(0), rows = num_prompt.shape(0);
    auto fits = [rows](const std::optional<Ints>& each) { return !each || each->shape(0) == rows; };
    if (positions.shape(0) != tokens || write_slots.shape(0) != tokens || query_start.shape(0) != rows + 1 ||
        tables.shape(0) != rows || prefix_groups.shape(0) != rows ||
        (window_slots && window_slots->shape(0) != tokens) ||
        (window_tables && (window_tables->shape(0) != rows || window_tables->shape(1) != tables.shape(1))) ||
        (visible_end && visible_end->shape(0) != tokens) ||
        (token_types && token_types->shape(0) != tokens) || !fits(slots) || !fits(load) || !fits(save) ||
        !fits(adapter_ids))
        throw nb::value_error("arrays of a step that disagree in size");
    return StepArrays{int(tokens),
                      int(rows),
                      int(tables.shape(1)),
                      int(logit_rows.shape(0)),
                      int(prefix_blocks.shape(0)),
                      token_ids.data(),
                      positions.data(),
                      write_slots.data(),
                      query_start.data(),
                      num_prompt.data(),
                      tables.data(),
                      logit_rows.data(),
                      prefix_groups.data(),
                      prefix_blocks.data(),
                      window_slots ? window_slots->data() : nullptr,
                      window_tables ? window_tables->data() : nullptr,
                      visible_end ? visible_end->data() : nullptr,
                      token_types ? token_types->data() : nullptr,
                      slots ? slots->data() : nullptr,
                      load ? load->data() : nullptr,
                      save ? save->data() : nullptr,
                      embeds ? int(embeds->shape(0)) : 0,
                      embeds ? embeds->data() : nullptr,
                      embed_rows ? embed_rows->data() : nullptr,
                      adapter_ids ? adapter_ids->data() : nullptr};
}

void bind_halves(nb::class_<BoundModel>& model) {
    model.def(
        "forward",
        [](BoundModel& self, Ints token_ids, Ints positions, Longs write_slots, Ints query_start,
           Ints num_prompt, Tables tables, Ints logit_rows, Ints prefix_groups, Ints prefix_blocks,
           Array<uint8_t, 1> finite, std::optional<Longs> window_slots, std::optional<Tables> window_tables,
           std::optional<Ints> visible_end, std::optional<Ints> token_types, std::optional<Ints> slots,
           std::optional<Ints> state_load, std::optional<Ints> state_save, std::optional<Embeds> embeds,
           std::optional<Ints> embed_rows, std::optional<Ints> adapter_ids, nb::handle taps,
           std::optional<Array<float, 2>> captured) {
            int width = self.model.executor.program(1).ops[0].matrix->columns;
            StepArrays step = step_arrays(token_ids, positions, write_slots, query_start, num_prompt, tables,
                                          logit_rows, prefix_groups, prefix_blocks, window_slots,
                                          window_tables, visible_end, token_types, slots, state_load,
                                          state_save, embeds, embed_rows, adapter_ids, width);
            if (finite.shape(0) != num_prompt.shape(0))
                throw nb::value_error("finite: another number of rows");
            uint8_t* flags = finite.data();
            TapCall tap_call;
            if (!taps.is_none()) step.taps = tap_call.read(taps, captured);
            nb::gil_scoped_release release;
            self.model.forward(step, flags);
        },
        nb::arg("token_ids"), nb::arg("positions"), nb::arg("write_slots"), nb::arg("query_start"),
        nb::arg("num_prompt"), nb::arg("block_tables"), nb::arg("logit_rows"), nb::arg("prefix_groups"),
        nb::arg("prefix_blocks"), nb::arg("finite"), nb::arg("window_slots") = nb::none(),
        nb::arg("window_tables") = nb::none(), nb::arg("visible_end") = nb::none(),
        nb::arg("token_types") = nb::none(), nb::arg("slots") = nb::none(),
        nb::arg("state_load") = nb::none(), nb::arg("state_save") = nb::none(),
        nb::arg("embeds") = nb::none(), nb::arg("embed_rows") = nb::none(),
        nb::arg("adapter_ids") = nb::none(), nb::arg("taps") = nb::none(), nb::arg("captured") = nb::none());
    model.def("set_sampler", [](BoundModel& self, int vocab, int max_slots, int max_seq_len) {
        self.model.set_sampler(vocab, max_slots, max_seq_len);
    });
    model.def("sample", [](BoundModel& self, nb::handle sampling) {
        SamplingCall call(sampling);
        if (call.inputs.rows != self.model.num_logits())
            throw nb::value_error("sampling and logits differ in rows");
        {
            nb::gil_scoped_release release;
            self.model.sample(call.inputs, call.outputs);
        }
        return call.results();
    });
    model.def("logits", [](BoundModel& self, int index, Array<float, 1> out) {
        self.check_row(index, out.shape(0), self.model.executor.width(self.model.output));
        memcpy(out.data(), self.model.logits(index), out.shape(0) * sizeof(float));
    });
    model.def("hidden", [](BoundModel& self, int index, Array<float, 1> out) {
        self.check_row(index, out.shape(0), self.model.hidden_size());
        self.model.hidden(index, out.data());
    });
    model.def("set_timing", [](BoundModel& self, bool on) { self.model.executor.set_timing(on); });
    model.def("op_seconds", [](BoundModel& self) { return self.model.executor.op_seconds(); });
}

}  // namespace

void bind_model(nb::module_& module) {
    nb::class_<BoundModel> model(module, "Model");
    model.def(
        nb::init<const std::string&, int, const std::vector<std::vector<int>>&, const std::vector<int>&>(),
        nb::arg("isa"), nb::arg("threads"), nb::arg("cpus"), nb::arg("nodes") = std::vector<int>());
    bind_memory(model);
    bind_blocks(model);
    bind_ops(model);
    bind_adapters(model);
    bind_halves(model);
    bind_taps(model);
}

}  // namespace engine
