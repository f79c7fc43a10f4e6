// The kernels of layers that keep a state. Each including file is compiled for one instruction set, which
// sets the vector width. Tokens of a sequence are computed one after the other, so a result does not depend
// on how a sequence is divided into steps.
#pragma once
#include <cmath>

#include "base/kernels.h"
#include "vector/vector_math.h"

namespace engine {
namespace {

constexpr int kMaxWindow = 64;
constexpr int kChains = 4;  // vectors of a head's columns that are computed together

// Loads `count` <= kLanes values. Other lanes are 0.
ENGINE_INLINE Floats load_some(const float* from, int count) {
    if (count == kLanes) return load(from);
    float values[kLanes] = {};
    for (int i = 0; i < count; i++) values[i] = from[i];
    return load(values);
}

ENGINE_INLINE void store_some(float* to, Floats value, int count) {
    if (count == kLanes) return store(to, value);
    for (int i = 0; i < count; i++) to[i] = value[i];
}

ENGINE_INLINE Floats silu(Floats x) {
    return x / (1.0f + vexp(-x));
}

ENGINE_INLINE float softplus(float x) {
    return x > 20 ? x : std::log1p(std::exp(x));
}

ENGINE_INLINE int lanes_from(int i, int size) {
    return size - i < kLanes ? size - i : kLanes;
}

// The convolution of `count` <= kLanes channels from `channel` on.
ENGINE_INLINE void convolve_lanes(const RecurrentJob& job, const RecurrentRow& row, int channel, int count) {
    const RecurrentShape& shape = *job.shape;
    const bool is_short = shape.mixer == RecurrentShape::Mixer::Conv;
    const int channels = shape.channels, last = shape.window - 1;
    const int start = shape.mixer == RecurrentShape::Mixer::Mamba2 ? shape.inner() : 0;
    const float* weights = job.weights->conv + channel;
    Floats window[kMaxWindow], factors[kMaxWindow];
    for (int i = 0; i <= last; i++) factors[i] = load_some(weights + size_t(i) * size_t(channels), count);
    for (int i = 0; i < last; i++)
        window[i] = row.is_new ? Floats{} : load_some(row.state + size_t(i) * size_t(channels) + channel, count);
    const float* bias = job.weights->conv_bias;
    const Floats first = bias ? load_some(bias + channel, count) : Floats{};
    for (int t = 0; t < row.count; t++) {
        float* source = job.input(row.tokens[t]) + start + channel;
        Floats x = load_some(source, count);
        if (is_short) x *= load_some(source + 2 * channels, count);
        Floats sum = first;
        for (int i = 0; i < last; i++) sum += factors[i] * window[i];
        sum += factors[last] * x;
        for (int i = 0; i + 1 < last; i++) window[i] = window[i + 1];
        window[last - 1] = x;
        if (is_short)
            store_some(job.result(row.tokens[t]) + channel, load_some(source + channels, count) * sum, count);
        else
            store_some(source, silu(sum), count);
    }
    for (int i = 0; i < last; i++)
        store_some(row.state + size_t(i) * size_t(channels) + channel, window[i], count);
}

void convolve(const RecurrentJob& job, const RecurrentRow& row, int begin, int end) {
    for (int channel = begin; channel < end; channel += kLanes)
        convolve_lanes(job, row, channel, lanes_from(channel, end));
}

// Calls update(column, vectors, lanes) for groups of columns of a head's matrix. The last group may have
// fewer lanes.
template <class Update>
ENGINE_INLINE void by_columns(int size, Update update) {
    int i = 0;
    for (; i + kChains * kLanes <= size; i += kChains * kLanes)
        update(i, std::integral_constant<int, kChains>(), kLanes);
    for (; i < size; i += kLanes) update(i, std::integral_constant<int, 1>(), lanes_from(i, size));
}

void scan_mamba2(const RecurrentJob& job, const RecurrentRow& row, int head, float* scratch) {
    const RecurrentShape& shape = *job.shape;
    const int inner = shape.inner(), size = shape.head_dim, states = shape.state_size;
    const int group = head / (shape.heads / shape.groups);
    float* matrix = row.state + shape.matrix_offset(head);
    if (row.is_new) memset(matrix, 0, size_t(states) * size_t(size) * sizeof(float));
    for (int t = 0; t < row.count; t++) {
        const float* source = job.input(row.tokens[t]);
        const float* x = source + inner + head * size;
        const float* b = source + 2 * inner + group * states;
        const float* c = b + shape.shared();
        const float step = softplus(source[inner + shape.channels + head] + job.weights->dt_bias[head]);
        const float decay = std::exp(step * job.weights->decay[head]), skip = job.weights->skip[head];
        float* out = job.result(row.tokens[t]) + head * size;
        for (int n = 0; n < states; n++) scratch[n] = step * b[n];
        by_columns(size, [&](int column, auto vectors, int lanes) {
            constexpr int V = decltype(vectors)::value;
            Floats values[V], sums[V];
            for (int v = 0; v < V; v++) {
                values[v] = load_some(x + column + v * kLanes, lanes);
                sums[v] = skip * values[v];
            }
            for (int n = 0; n < states; n++) {
                float* place = matrix + n * size + column;
                for (int v = 0; v < V; v++) {
                    Floats held = load_some(place + v * kLanes, lanes) * decay + scratch[n] * values[v];
                    sums[v] += held * c[n];
                    store_some(place + v * kLanes, held, lanes);
                }
            }
            for (int v = 0; v < V; v++) store_some(out + column + v * kLanes, sums[v], lanes);
        });
    }
}

// Writes x / sqrt(sum of squares + eps) * factor.
ENGINE_INLINE void unit(const float* x, int size, float factor, float* out) {
    double squares = 0;
    for (int i = 0; i < size; i++) squares += double(x[i]) * double(x[i]);
    const float scale = float(1 / std::sqrt(squares + 1e-6)) * factor;
    for (int i = 0; i < size; i++) out[i] = x[i] * scale;
}

// out = x * silu(gate)
ENGINE_INLINE void gate_values(float* x, const float* gate, int size) {
    for (int i = 0; i < size; i += kLanes) {
        const int lanes = lanes_from(i, size);
        store_some(x + i, load_some(x + i, lanes) * silu(load_some(gate + i, lanes)), lanes);
    }
}

void scan_delta(const RecurrentJob& job, const RecurrentRow& row, int head, float* scratch) {
    const RecurrentShape& shape = *job.shape;
    const int size = shape.head_dim, states = shape.state_size, shared = shape.shared();
    const int group = head / (shape.heads / shape.groups);
    float* matrix = row.state + shape.matrix_offset(head);
    if (row.is_new) memset(matrix, 0, size_t(states) * size_t(size) * sizeof(float));
    float *query = scratch, *key = scratch + states;
    for (int t = 0; t < row.count; t++) {
        const float* source = job.input(row.tokens[t]);
        const float* value = source + 2 * shared + head * size;
        const float* gates = source + shape.channels + shape.inner();
        unit(source + group * states, states, 1 / std::sqrt(float(states)), query);
        unit(source + shared + group * states, states, 1.0f, key);
        const float beta = 1 / (1 + std::exp(-gates[head]));
        const float step = softplus(gates[shape.heads + head] + job.weights->dt_bias[head]);
        const float decay = std::exp(step * job.weights->decay[head]);
        float* out = job.result(row.tokens[t]) + head * size;
        by_columns(size, [&](int column, auto vectors, int lanes) {
            constexpr int V = decltype(vectors)::value;
            Floats known[V] = {}, changes[V], sums[V] = {};
            for (int n = 0; n < states; n++)
                for (int v = 0; v < V; v++)
                    known[v] += key[n] * load_some(matrix + n * size + column + v * kLanes, lanes);
            for (int v = 0; v < V; v++)
                changes[v] = (load_some(value + column + v * kLanes, lanes) - decay * known[v]) * beta;
            for (int n = 0; n < states; n++) {
                float* place = matrix + n * size + column;
                for (int v = 0; v < V; v++) {
                    Floats held = load_some(place + v * kLanes, lanes) * decay + key[n] * changes[v];
                    sums[v] += held * query[n];
                    store_some(place + v * kLanes, held, lanes);
                }
            }
            for (int v = 0; v < V; v++) store_some(out + column + v * kLanes, sums[v], lanes);
        });
    }
}

ENGINE_INLINE void fill_recurrent(Kernels& table) {
    table.convolve = convolve;
    table.scan[int(RecurrentShape::Mixer::Mamba2)] = scan_mamba2;
    table.scan[int(RecurrentShape::Mixer::Delta)] = scan_delta;
    table.gate_values = [](float* x, const float* gate, int size) { gate_values(x, gate, size); };
}

}  // namespace
}  // namespace engine
