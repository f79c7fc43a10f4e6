// The executor's op for layers that keep a state.
#include <algorithm>

#include "executor/executor.h"

namespace engine {
namespace {

constexpr int kChannels = 256;  // channels of the convolution that a thread claims at a time

}  // namespace

void Executor::set_states(size_t floats, int count) {
    states_ = StateShape{floats, count};
    state_memory_ = Block(floats * size_t(count) * sizeof(float));
}

void Executor::copy_state(int from, int to) {
    const float* source = state(from);
    std::copy(source, source + states_.floats, state(to));
}

void Executor::plan_recurrent(const Op& op) {
    const RecurrentShape& shape = op.recurrence;
    rounds_.push_back({batch_->rows * div_up(shape.channels, kChannels), 1});
    if (shape.mixer == RecurrentShape::Mixer::Conv) return;
    rounds_.push_back({batch_->rows * shape.heads, 1});
    rounds_.push_back({batch_->tokens, 1});
}

RecurrentRow Executor::recurrent_row(const RecurrentShape& shape, int row) const {
    const int32_t begin = batch_->row_start[row], end = batch_->row_start[row + 1];
    const int32_t* tokens = batch_->row_tokens + begin;
    const bool is_new = begin < end && batch_->positions[tokens[0]] == 0;
    return {tokens, end - begin, is_new, state(batch_->slots[row]) + shape.state_offset};
}

void Executor::recurrent(const Op& op, int thread, int& index) {
    const RecurrentShape& shape = op.recurrence;
    const RecurrentJob job{&shape,        &op.recurrent_weights, at(op.source, 0), width(op.source),
                           at(op.out, 0), width(op.out)};
    const int blocks = div_up(shape.channels, kChannels);
    round(thread, index, [&](int begin, int end) {
        for (int i = begin; i < end; i++) {
            const int first = i % blocks * kChannels;
            kernels_.convolve(job, recurrent_row(shape, i / blocks), first,
                              std::min(first + kChannels, shape.channels));
        }
    });
    if (shape.mixer == RecurrentShape::Mixer::Conv) return;
    const auto scan = kernels_.scan[int(shape.mixer)];
    round(thread, index, [&](int begin, int end) {
        for (int i = begin; i < end; i++)
            scan(job, recurrent_row(shape, i / shape.heads), i % shape.heads, rows_[size_t(thread)].floats());
    });
    round(thread, index, [&](int begin, int end) {
        for (int token = begin; token < end; token++) finish_recurrent(job, token);
    });
}

// Gates and normalizes the result of one token.
void Executor::finish_recurrent(const RecurrentJob& job, int token) const {
    const RecurrentShape& shape = *job.shape;
    const bool is_mamba = shape.mixer == RecurrentShape::Mixer::Mamba2;
    const int inner = shape.inner(), size = is_mamba ? inner / shape.norm_groups : shape.head_dim;
    const float* gate = job.input(token) + (is_mamba ? 0 : shape.channels);
    float* out = job.result(token);
    if (is_mamba) kernels_.gate_values(out, gate, inner);
    for (int i = 0; i < inner; i += size)
        kernels_.rms_norm(out + i, job.weights->norm + (is_mamba ? i : 0), shape.eps, size, out + i);
    if (!is_mamba) kernels_.gate_values(out, gate, inner);
}

}  // namespace engine
