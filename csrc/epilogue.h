// From the sums of a panel to the output: bias, activation, gate, residual, and the last panel's tail.
#pragma once
#include "kernels.h"
#include "vector_math.h"

namespace engine {
namespace {

// Twice the share of a normal distribution that lies above x >= 0.
ENGINE_INLINE Floats two_tails(Floats x) {
    Floats t = 1.0f / (1.0f + 0.23164189f * x);
    Floats p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    return p * t * vexp(-0.5f * x * x);
}

ENGINE_INLINE Floats activate(Activation activation, Floats x) {
    switch (activation) {
        case Activation::Silu:
            return x / (1.0f + vexp(-x));
        case Activation::Gelu: {
            Floats tail = 0.5f * x * two_tails(x < 0.0f ? -x : x);
            return x > 0.0f ? x - tail : tail;
        }
        case Activation::GeluTanh: {  // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
            Floats twice = 1.59576912f * x * (1.0f + 0.044715f * x * x);
            return x / (1.0f + vexp(-twice));
        }
        default:
            return x;
    }
}

// How many values a unit puts out for a row.
ENGINE_INLINE int unit_width(const MatmulJob& job, int unit) {
    int width = job.epilogue.gated ? job.weights->rows / 2 : job.weights->rows;
    int left = width - unit * kPanelRows;
    return left < kPanelRows ? left : kPanelRows;
}

// `sums` of a unit: 16 of its panel, or 16 of the gate and 16 of the other.
__attribute__((noinline)) void finish_unit(const MatmulJob& job, int unit, int row, float* sums) {
    const Epilogue& to = job.epilogue;
    const float* bias = to.bias ? to.bias + size_t(unit) * kPanelRows * (to.gated ? 2 : 1) : nullptr;
    for (int i = 0; i < kPanelRows; i += kLanes) {
        Floats value = load(sums + i);
        if (bias) value += load(bias + i);
        value = activate(to.activation, value);
        if (to.gated) {
            Floats other = load(sums + kPanelRows + i);
            value *= bias ? other + load(bias + kPanelRows + i) : other;
        }
        store(sums + i, value);
    }
    float* out = to.out + size_t(row) * size_t(to.stride) + size_t(unit) * kPanelRows;
    int width = unit_width(job, unit);
    if (width == kPanelRows) {
        for (int i = 0; i < kPanelRows; i += kLanes)
            store(out + i, to.residual ? load(out + i) + load(sums + i) : load(sums + i));
    } else {
        for (int i = 0; i < width; i++) out[i] = to.residual ? out[i] + sums[i] : sums[i];
    }
}

}  // namespace
}  // namespace engine
