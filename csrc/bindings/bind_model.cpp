// Binds `Model`: its weights, its programs, and the two halves of a step, `forward` and `sample`.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <deque>

#include "bindings/bind_sampler.h"
#include "executor/model.h"
#include "per_channel/requantized.h"

namespace engine {
namespace {

using Ints = Array<const int32_t, 1>;
using Longs = Array<const int64_t, 1>;
using Tables = Array<const int32_t, 2>;
using Embeds = Array<const float, 2>;

// A model whose weights are Python arrays. The object holds references to these arrays.
class BoundModel {
  public:
    BoundModel(const std::string& isa, int threads, const std::vector<int>& cpus)
        : model(kernels_named(isa), threads, cpus) {}

    int add_matrix(int layout, int rows, int columns, Array<const uint8_t, 1> data) {
        Matrix matrix{Layout(layout), rows, columns, data.data()};
        if (layout < 0 || layout > int(Layout::F32) || rows < 1 || columns < 1 ||
            data.shape(0) < matrix.bytes())
            throw nb::value_error("a matrix that its bytes do not hold");
        if (reinterpret_cast<uintptr_t>(data.data()) % 64)
            throw nb::value_error("a matrix must be 64-byte aligned");
        matrices_.push_back(matrix);
        panels_.push_back(int(data.shape(0) / matrix.stride()));
        keep_.push_back(nb::cast(data));
        return int(matrices_.size()) - 1;
    }

    int add_vector(Array<const float, 1> data) {
        vectors_.push_back(data.data());
        keep_.push_back(nb::cast(data));
        return int(vectors_.size()) - 1;
    }

    // Requantizes the matrices with the indices `numbers` to per-channel int8. Returns the indices
    // of the new matrices.
    std::vector<int> add_per_channel(const std::vector<int>& numbers) {
        if (!model.executor.kernels().requantize_panel)
            throw nb::value_error("this instruction set has no per-channel int8 matmul");
        std::vector<StoredPanels> from;
        for (int number : numbers) {
            from.push_back({matrix(number), panels_.at(size_t(number))});
            if (from.back().matrix->columns > kMaxPerChannelColumns)
                throw nb::value_error("a matrix of too many columns for per-channel int8");
        }
        RequantizedMatrices per_channel =
            requantize_matrices(model.executor.kernels(), model.executor.pool(), from);
        std::vector<int> added;
        for (const Matrix& matrix : per_channel.matrices) {
            added.push_back(int(matrices_.size()));
            matrices_.push_back(matrix);
        }
        per_channel_.push_back(std::move(per_channel.memory));
        return added;
    }

    // `numbers`: matrix, bias, decode numerics, prefill numerics. The matrix has the panels of all experts.
    ExpertMatrices expert_matrices(int num_experts, const std::tuple<int, int, int, int>& numbers) const {
        auto [index, bias, decode, prefill] = numbers;
        const Matrix* all = matrix(index);
        int panels = panels_.at(size_t(index)) / num_experts;
        return {*all,
                size_t(panels) * all->stride(),
                vector(bias),
                panels * kPanelRows,
                Numerics(decode),
                Numerics(prefill)};
    }

    const Matrix* matrix(int index) const { return &matrices_.at(size_t(index)); }
    const float* vector(int index) const { return index < 0 ? nullptr : vectors_.at(size_t(index)); }

    void check_row(int index, size_t size, int expected) const {
        if (index < 0 || index >= model.num_logits() || size != size_t(expected))
            throw nb::value_error("no such row of logits, or one of another size");
    }

    void begin_program(int capacity) {
        program_ = Program{};
        program_.capacity = capacity;
    }
    void add_op(const Op& op) { program_.ops.push_back(op); }
    void end_program() { model.executor.add_program(std::move(program_)); }

    Model model;

  private:
    std::deque<Matrix> matrices_;  // the matrices that Python added, then the requantized ones
    std::vector<int> panels_;      // number of panels of each matrix that Python added
    std::vector<const float*> vectors_;
    std::vector<nb::object> keep_;
    std::vector<Block> per_channel_;
    Program program_;
};

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

void bind_ops(nb::class_<BoundModel>& model) {
    model.def("begin_program", &BoundModel::begin_program);
    model.def("end_program", &BoundModel::end_program);
    model.def("embed",
              [](BoundModel& self, int out, int table, int positions, float scale, int types, int num_types) {
                  Op op;
                  op.kind = Op::Kind::Embed;
                  op.out = out;
                  op.matrix = self.matrix(table);
                  op.positions = self.vector(positions);
                  op.types = self.vector(types);
                  op.num_types = num_types;
                  op.scale = scale;
                  self.add_op(op);
              });
    model.def(
        "norm",
        [](BoundModel& self, int source, int out, int kind, int weight, int bias, float eps, bool residual,
           bool over_logits) {
            Op op;
            op.kind = Op::Kind::Norm;
            op.source = source;
            op.out = out;
            op.norm = Norm{Norm::Kind(kind), self.vector(weight), self.vector(bias), eps};
            op.residual = residual;
            op.over_logits = over_logits;
            self.add_op(op);
        },
        nb::kw_only(), nb::arg("source"), nb::arg("out"), nb::arg("kind"), nb::arg("weight"), nb::arg("bias"),
        nb::arg("eps"), nb::arg("residual"), nb::arg("over_logits"));
    auto add_pooling = [&](const char* name, Op::Kind kind) {
        model.def(name, [kind](BoundModel& self, int source, int out) {
            Op op;
            op.kind = kind;
            op.source = source;
            op.out = out;
            self.add_op(op);
        });
    };
    add_pooling("gather", Op::Kind::Gather);
    add_pooling("mean", Op::Kind::Mean);
    model.def(
        "linear",
        [](BoundModel& self, int source, int out, int matrix, int per_channel, int norm, int norm_weight,
           int norm_bias, float eps, int bias, int activation, bool gated, bool residual, bool multiply,
           bool over_logits, int column, int grain, int decode, int prefill, float scale, float softcap) {
            Op op;
            op.kind = Op::Kind::Linear;
            op.source = source;
            op.out = out;
            op.matrix = self.matrix(matrix);
            op.per_channel = per_channel < 0 ? nullptr : self.matrix(per_channel);
            op.norm = Norm{Norm::Kind(norm), self.vector(norm_weight), self.vector(norm_bias), eps};
            op.bias = self.vector(bias);
            op.activation = Activation(activation);
            op.gated = gated;
            op.residual = residual;
            op.multiply = multiply;
            op.over_logits = over_logits;
            op.column = column;
            op.grain = grain;
            op.decode = Numerics(decode);
            op.prefill = Numerics(prefill);
            op.scale = scale;
            op.softcap = softcap;
            self.add_op(op);
        },
        nb::kw_only(), nb::arg("source"), nb::arg("out"), nb::arg("matrix"), nb::arg("per_channel"),
        nb::arg("norm"), nb::arg("norm_weight"), nb::arg("norm_bias"), nb::arg("eps"), nb::arg("bias"),
        nb::arg("activation"), nb::arg("gated"), nb::arg("residual"), nb::arg("multiply"),
        nb::arg("over_logits"), nb::arg("column"), nb::arg("grain"), nb::arg("decode"), nb::arg("prefill"),
        nb::arg("scale"), nb::arg("softcap"));
}

void bind_attention_ops(nb::class_<BoundModel>& model) {
    model.def(
        "rope_write",
        [](BoundModel& self, int qkv, int cache, int layer, int heads, int kv_heads, int head_dim, int rope,
           int rope_dim, int query_norm, int key_norm, float eps, bool whole_norm) {
            Op op;
            op.kind = Op::Kind::RopeWrite;
            op.source = qkv;
            op.cache = cache;
            op.layer = layer;
            op.shape = AttentionShape{heads, kv_heads, head_dim, 0, 0};
            op.rope = rope;
            op.rope_dim = rope_dim;
            op.query_norm = self.vector(query_norm);
            op.key_norm = self.vector(key_norm);
            op.eps = eps;
            op.whole_norm = whole_norm;
            self.add_op(op);
        },
        nb::kw_only(), nb::arg("qkv"), nb::arg("cache"), nb::arg("layer"), nb::arg("heads"),
        nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("rope"), nb::arg("rope_dim"), nb::arg("query_norm"),
        nb::arg("key_norm"), nb::arg("eps"), nb::arg("whole_norm"));
    model.def(
        "attention",
        [](BoundModel& self, int qkv, int out, int cache, int layer, int heads, int kv_heads, int head_dim,
           float scale, int window, float softcap, int slopes, int sinks, bool centered, int latent) {
            Op op;
            op.kind = Op::Kind::Attention;
            op.source = qkv;
            op.out = out;
            op.cache = cache;
            op.layer = layer;
            op.shape = AttentionShape{
                heads,    kv_heads, head_dim, scale, window, softcap, self.vector(slopes), self.vector(sinks),
                centered, latent};
            self.add_op(op);
        },
        nb::kw_only(), nb::arg("qkv"), nb::arg("out"), nb::arg("cache"), nb::arg("layer"), nb::arg("heads"),
        nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("scale"), nb::arg("window"), nb::arg("softcap"),
        nb::arg("slopes"), nb::arg("sinks"), nb::arg("centered"), nb::arg("latent"));
}

void bind_latent_ops(nb::class_<BoundModel>& model) {
    model.def("latent_write",
              [](BoundModel& self, int source, int layer, std::tuple<int, int> rope, int norm, float eps) {
                  Op op;
                  op.kind = Op::Kind::LatentWrite;
                  op.source = source;
                  op.layer = layer;
                  std::tie(op.rope, op.rope_dim) = rope;
                  op.key_norm = self.vector(norm);
                  op.eps = eps;
                  self.add_op(op);
              });
    model.def(
        "head_linear",
        [](BoundModel& self, int source, int out, int heads, const std::tuple<int, int, int, int>& matrices,
           std::tuple<int, int> rope, bool over_logits) {
            Op op;
            op.kind = Op::Kind::HeadLinear;
            op.source = source;
            op.out = out;
            op.num_experts = heads;
            op.by_head = self.expert_matrices(heads, matrices);
            std::tie(op.rope, op.rope_dim) = rope;
            op.over_logits = over_logits;
            self.add_op(op);
        },
        nb::kw_only(), nb::arg("source"), nb::arg("out"), nb::arg("heads"), nb::arg("matrices"),
        nb::arg("rope"), nb::arg("over_logits"));
}

void bind_expert_ops(nb::class_<BoundModel>& model) {
    model.def(
        "route",
        [](BoundModel& self, int source, int out, int num_experts, int per_token, int scoring,
           bool renormalizes, float scale, int groups, int groups_per_token, bool best_two, int correction,
           bool over_logits) {
            Op op;
            op.kind = Op::Kind::Route;
            op.source = source;
            op.out = out;
            op.num_experts = num_experts;
            op.routing = Routing{Routing::Scoring(scoring), per_token, renormalizes,           scale, groups,
                                 groups_per_token,          best_two,  self.vector(correction)};
            op.over_logits = over_logits;
            self.add_op(op);
        },
        nb::kw_only(), nb::arg("source"), nb::arg("out"), nb::arg("num_experts"), nb::arg("per_token"),
        nb::arg("scoring"), nb::arg("renormalizes"), nb::arg("scale"), nb::arg("groups"),
        nb::arg("groups_per_token"), nb::arg("best_two"), nb::arg("correction"), nb::arg("over_logits"));
    model.def(
        "experts",
        [](BoundModel& self, int source, int weights, int out, int num_experts, int per_token, int activation,
           const std::tuple<int, int, int, int>& up, const std::tuple<int, int, int, int>& down, float scale,
           bool residual, bool over_logits) {
            Op op;
            op.kind = Op::Kind::Experts;
            op.source = source;
            op.weights = weights;
            op.out = out;
            op.num_experts = num_experts;
            op.routing.per_token = per_token;
            op.activation = Activation(activation);
            op.up = self.expert_matrices(num_experts, up);
            op.down = self.expert_matrices(num_experts, down);
            op.scale = scale;
            op.residual = residual;
            op.over_logits = over_logits;
            self.add_op(op);
        },
        nb::kw_only(), nb::arg("source"), nb::arg("weights"), nb::arg("out"), nb::arg("num_experts"),
        nb::arg("per_token"), nb::arg("activation"), nb::arg("up"), nb::arg("down"), nb::arg("scale"),
        nb::arg("residual"), nb::arg("over_logits"));
    model.def(
        "recurrent",
        [](BoundModel& self, int source, int out, int mixer, const std::vector<int>& sizes, float eps,
           size_t state_offset, const std::vector<int>& weights) {
            Op op;
            op.kind = Op::Kind::Recurrent;
            op.source = source;
            op.out = out;
            auto size = [&](size_t index) { return sizes.at(index); };
            op.recurrence = {RecurrentShape::Mixer(mixer),
                             size(0),
                             size(1),
                             size(2),
                             size(3),
                             size(4),
                             size(5),
                             size(6),
                             eps,
                             state_offset};
            auto vector = [&](size_t index) { return self.vector(weights.at(index)); };
            op.recurrent_weights = {vector(0), vector(1), vector(2), vector(3), vector(4), vector(5)};
            self.add_op(op);
        },
        nb::kw_only(), nb::arg("source"), nb::arg("out"), nb::arg("mixer"), nb::arg("sizes"), nb::arg("eps"),
        nb::arg("state_offset"), nb::arg("weights"));
    model.def("gate_rows", [](BoundModel& self, int source, int out, bool over_logits) {
        Op op;
        op.kind = Op::Kind::GateRows;
        op.source = source;
        op.out = out;
        op.over_logits = over_logits;
        self.add_op(op);
    });
}

// Collects the arrays of one step, which Python owns, and checks that their sizes match.
StepArrays step_arrays(Ints token_ids, Ints positions, Longs write_slots, Ints query_start, Ints num_prompt,
                       Tables tables, Ints logit_rows, Ints prefix_groups, Ints prefix_blocks,
                       const std::optional<Longs>& window_slots, const std::optional<Tables>& window_tables,
                       const std::optional<Ints>& visible_end, const std::optional<Ints>& token_types,
                       const std::optional<Ints>& slots, const std::optional<Ints>& load,
                       const std::optional<Ints>& save, const std::optional<Embeds>& embeds,
                       const std::optional<Ints>& embed_rows, int width) {
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
        (token_types && token_types->shape(0) != tokens) || !fits(slots) || !fits(load) || !fits(save))
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
                      embed_rows ? embed_rows->data() : nullptr};
}

void bind_halves(nb::class_<BoundModel>& model) {
    model.def(
        "forward",
        [](BoundModel& self, Ints token_ids, Ints positions, Longs write_slots, Ints query_start,
           Ints num_prompt, Tables tables, Ints logit_rows, Ints prefix_groups, Ints prefix_blocks,
           Array<uint8_t, 1> finite, std::optional<Longs> window_slots, std::optional<Tables> window_tables,
           std::optional<Ints> visible_end, std::optional<Ints> token_types, std::optional<Ints> slots,
           std::optional<Ints> state_load, std::optional<Ints> state_save, std::optional<Embeds> embeds,
           std::optional<Ints> embed_rows) {
            int width = self.model.executor.program(1).ops[0].matrix->columns;
            StepArrays step =
                step_arrays(token_ids, positions, write_slots, query_start, num_prompt, tables, logit_rows,
                            prefix_groups, prefix_blocks, window_slots, window_tables, visible_end,
                            token_types, slots, state_load, state_save, embeds, embed_rows, width);
            if (finite.shape(0) != num_prompt.shape(0))
                throw nb::value_error("finite: another number of rows");
            uint8_t* flags = finite.data();
            nb::gil_scoped_release release;
            self.model.forward(step, flags);
        },
        nb::arg("token_ids"), nb::arg("positions"), nb::arg("write_slots"), nb::arg("query_start"),
        nb::arg("num_prompt"), nb::arg("block_tables"), nb::arg("logit_rows"), nb::arg("prefix_groups"),
        nb::arg("prefix_blocks"), nb::arg("finite"), nb::arg("window_slots") = nb::none(),
        nb::arg("window_tables") = nb::none(), nb::arg("visible_end") = nb::none(),
        nb::arg("token_types") = nb::none(), nb::arg("slots") = nb::none(),
        nb::arg("state_load") = nb::none(), nb::arg("state_save") = nb::none(),
        nb::arg("embeds") = nb::none(), nb::arg("embed_rows") = nb::none());
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
    model.def(nb::init<const std::string&, int, const std::vector<int>&>());
    bind_memory(model);
    bind_ops(model);
    bind_attention_ops(model);
    bind_latent_ops(model);
    bind_expert_ops(model);
    bind_halves(model);
}

}  // namespace engine
