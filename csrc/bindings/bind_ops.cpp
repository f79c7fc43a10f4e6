// Binds the methods of `Model` that append an op to its program, one for each kind of op.
#include "bindings/bound_model.h"

namespace engine {
namespace {

void bind_plain_ops(nb::class_<BoundModel>& model) {
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
           bool over_logits, int column, int grain, int decode, int prefill, float scale, float softcap,
           int site) {
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
            op.site = site;
            self.add_op(op);
        },
        nb::kw_only(), nb::arg("source"), nb::arg("out"), nb::arg("matrix"), nb::arg("per_channel"),
        nb::arg("norm"), nb::arg("norm_weight"), nb::arg("norm_bias"), nb::arg("eps"), nb::arg("bias"),
        nb::arg("activation"), nb::arg("gated"), nb::arg("residual"), nb::arg("multiply"),
        nb::arg("over_logits"), nb::arg("column"), nb::arg("grain"), nb::arg("decode"), nb::arg("prefill"),
        nb::arg("scale"), nb::arg("softcap"), nb::arg("site") = -1);
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

}  // namespace

void bind_ops(nb::class_<BoundModel>& model) {
    bind_plain_ops(model);
    bind_attention_ops(model);
    bind_latent_ops(model);
    bind_expert_ops(model);
}

}  // namespace engine
