#include "executor/taps.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "executor/executor.h"

namespace engine {
namespace {

using Point = TapSite::Point;

float dot(const float* a, const float* b, int size) {
    float sum = 0;
    for (int i = 0; i < size; i++) sum += a[i] * b[i];
    return sum;
}

void add_scaled(float* x, const float* y, float factor, int size) {
    for (int i = 0; i < size; i++) x[i] += factor * y[i];
}

float activated(Activation activation, float x) {
    switch (activation) {
        case Activation::Silu:
            return x / (1 + std::exp(-x));
        case Activation::Gelu:
            return 0.5f * x * std::erfc(-x * 0.70710678f);
        case Activation::GeluTanh:
            return x / (1 + std::exp(-1.59576912f * x * (1 + 0.044715f * x * x)));
        case Activation::Relu2:
            return x > 0 ? x * x : 0;
        default:
            return x;
    }
}

}  // namespace

void TapArrays::apply(int index, float* x, int width) const {
    const float scale = scales[index];
    const TapKind kind = TapKind(kinds[index]);
    if (kind == TapKind::Capture) {
        std::copy(x, x + width, captured + size_t(rows[index]) * size_t(captured_width));
        return;
    }
    const float* v = vectors + size_t(rows[index]) * size_t(vector_width);
    switch (kind) {
        case TapKind::Add:
            return add_scaled(x, v, scale, width);
        case TapKind::Scale:
            for (int i = 0; i < width; i++) x[i] *= scale;
            return;
        case TapKind::Set:
            for (int i = 0; i < width; i++) x[i] = scale * v[i];
            return;
        case TapKind::ProjectOut:
            return add_scaled(x, v, -scale * dot(x, v, width), width);
        default: {
            float feature = dot(x, v, width) + v[vector_width - 2];
            if (feature <= v[vector_width - 1]) feature = 0;
            add_scaled(x, v + vector_width, scale - feature, width);
        }
    }
}

// The program with the ops that apply the step's taps. Ops without taps are the same as in `program`, so
// tokens without taps keep their bits.
const Program& Executor::with_taps(const Program& program) {
    tapped_.capacity = program.capacity;
    tapped_.ops.clear();
    tap_groups_.clear();
    tap_matrices_.clear();
    std::vector<std::vector<int>> by_op(program.ops.size());  // sites with taps
    for (int i = 0; i < taps_.count; i++)
        if (i == 0 || taps_.sites[i] != taps_.sites[i - 1])
            by_op[size_t(sites_[size_t(taps_.sites[i])].op)].push_back(taps_.sites[i]);
    for (size_t i = 0; i < program.ops.size(); i++) add_tapped(program.ops[i], by_op[i]);
    return tapped_;
}

void Executor::add_tapped(Op op, const std::vector<int>& sites) {
    auto at_point = [&](Point point, auto&& act) {
        for (int site : sites)
            if (sites_[size_t(site)].point == point) act(site);
    };
    const Op plain = op;
    at_point(Point::Before, [&](int site) { add_tap(site, op.source, op); });
    at_point(Point::Normed, [&](int site) {
        Op norm;
        norm.kind = Op::Kind::Norm;
        norm.source = op.source;
        norm.norm = op.norm;
        norm.over_logits = op.over_logits;
        norm.out = op.source = extra_buffer(width(plain.source));
        op.norm = Norm{};
        tapped_.ops.push_back(norm);
        add_tap(site, norm.out, op);
    });
    at_point(Point::PreActivation, [&](int) { add_pre_activation(op); });
    bool is_added = false;
    at_point(Point::Result, [&](int site) {
        is_added = true;
        Op last;
        last.kind = op.kind == Op::Kind::Embed ? Op::Kind::AddPositions : Op::Kind::AddRows;
        last.positions = op.positions;
        last.types = op.types;
        last.matrix = op.matrix;
        last.scale = op.scale;
        last.out = op.out;
        last.over_logits = op.over_logits;
        if (op.kind == Op::Kind::Embed) {
            op.positions = op.types = nullptr;
        } else {
            op.out = extra_buffer(width(plain.out));
            op.residual = false;
            op.scale = 1;
        }
        last.source = op.out;
        tapped_.ops.push_back(op);
        add_tap(site, op.out, op);
        tapped_.ops.push_back(last);
    });
    if (!is_added) tapped_.ops.push_back(op);
    at_point(Point::PreActivation, [&](int site) {
        tapped_.ops.push_back(tap_op(site, op.out, op));
        tapped_.ops.back().source = pre_activations_;
    });
    at_point(Point::After, [&](int site) { add_tap(site, plain.out < 0 ? plain.source : plain.out, op); });
}

// A gated matrix alternates between panels of gate and up, so the result does too.
void Executor::add_pre_activation(const Op& op) {
    Op pre = op;
    tap_matrices_.push_back(*op.matrix);
    if (op.gated) tap_matrices_.back().rows = 2 * round_up(op.matrix->rows / 2, kPanelRows);
    pre.matrix = &tap_matrices_.back();
    pre.per_channel = nullptr;
    pre.activation = Activation::None;
    pre.gated = false;
    pre.grain = 1;
    pre.column = 0;
    pre.out = pre_activations_ = extra_buffer(pre.matrix->rows);
    tapped_.ops.push_back(pre);
}

Op Executor::tap_op(int site, int buffer, const Op& near) {
    Op tap;
    tap.kind = Op::Kind::Tap;
    tap.out = buffer;
    tap.over_logits = near.over_logits;
    tap.activation = near.activation;
    tap.gated = near.gated;
    tap.column = sites_[size_t(site)].column;
    tap.layer = int(tap_groups_.size());
    // A group has the taps of one token at the site, which one thread applies in order.
    for (int i = 0; i < taps_.count; i++) {
        if (taps_.sites[i] != site) continue;
        bool is_next = tap.weights < 0 || taps_.tokens[i] != taps_.tokens[i - 1];
        if (is_next) tap_groups_.push_back({site, i, i});
        tap_groups_.back().end = i + 1;
        tap.weights = i;
    }
    tap.num_experts = int(tap_groups_.size()) - tap.layer;
    return tap;
}

void Executor::add_tap(int site, int buffer, const Op& near) {
    tapped_.ops.push_back(tap_op(site, buffer, near));
}

// Memory for results that plain programs never store. It is kept for later steps with taps.
int Executor::extra_buffer(int width) {
    auto found = extra_buffers_.find(width);
    if (found != extra_buffers_.end()) return found->second;
    extra_memory_.emplace_back(round_up_size(size_t(width) * size_t(arena_.max_tokens), 1024) *
                               sizeof(float));
    buffers_.push_back(extra_memory_.back().floats());
    arena_.buffers.push_back({-1, width});
    return extra_buffers_[width] = int(buffers_.size()) - 1;
}

void Executor::tap(const Op& op, int begin, int end) {
    for (int g = begin; g < end; g++) {
        const TapGroup& group = tap_groups_[size_t(op.layer + g)];
        const int token = taps_.tokens[group.begin];
        const int row = op.over_logits ? batch_->logit_of[token] : token;
        if (row < 0) continue;  // what follows is not computed for this token
        const int width = sites_[size_t(group.site)].width;
        if (op.source >= 0) {
            tap_pre_activation(op, group, row, width);
            continue;
        }
        float* x = at(op.out, row) + op.column;
        for (int i = group.begin; i < group.end; i++) taps_.apply(i, x, width);
    }
}

void Executor::tap_pre_activation(const Op& op, const TapGroup& group, int row, int width) {
    const float* pre = at(op.source, row);
    auto place = [&](int i) { return op.gated ? i / kPanelRows * 2 * kPanelRows + i % kPanelRows : i; };
    std::vector<float> x(static_cast<size_t>(width));
    for (int i = 0; i < width; i++) x[size_t(i)] = pre[place(i)];
    bool is_edited = false;
    for (int i = group.begin; i < group.end; i++) {
        taps_.apply(i, x.data(), width);
        is_edited |= TapKind(taps_.kinds[i]) != TapKind::Capture;
    }
    float* out = at(op.out, row);
    for (int i = 0; is_edited && i < width; i++) {
        float factor = op.gated ? pre[place(i) + kPanelRows] : 1;
        out[i] = activated(op.activation, x[size_t(i)]) * factor;
    }
}

void Executor::add_rows(const Op& op, int begin, int end) {
    const int size = width(op.out);
    for (int r = begin; r < end; r++) {
        float* out = at(op.out, r);
        const float* result = at(op.source, r);
        if (op.scale == 1)
            for (int i = 0; i < size; i++) out[i] += result[i];
        else
            for (int i = 0; i < size; i++) out[i] += op.scale * result[i];
    }
}

void Executor::run_head(int rows) {
    Batch batch;
    batch.logits = batch.decode_logits = rows;
    Program head;
    head.ops.push_back(programs_.back().ops.back());
    batch_ = &batch;
    plan_rounds(head);
    const bool timing = std::exchange(timing_, false);
    pool_.run([&](int thread) { work(head, thread); });
    timing_ = timing;
}

}  // namespace engine
