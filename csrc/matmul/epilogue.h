// The epilogue of a matmul in portable vector code: it applies bias, activation and gate to the
// accumulators and adds the residual. The last panel may have fewer than 16 channels.
#pragma once
#include "base/kernels.h"
#include "vector/vector_math.h"

namespace engine {
namespace {

// erfc(x / sqrt(2)) for x >= 0.
ENGINE_INLINE Floats erfc_over_sqrt2(Floats x) {
    Floats t = 1.0f / (1.0f + 0.23164189f * x);
    Floats p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    return p * t * vexp(-0.5f * x * x);
}

template <Activation activation>
ENGINE_INLINE Floats activate(Floats x) {
    if (activation == Activation::Silu) return x / (1.0f + vexp(-x));
    if (activation == Activation::Gelu) {
        Floats tail = 0.5f * x * erfc_over_sqrt2(x < 0.0f ? -x : x);
        return x > 0.0f ? x - tail : tail;
    }
    if (activation == Activation::GeluTanh) {  // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
        Floats twice = 1.59576912f * x * (1.0f + 0.044715f * x * x);
        return x / (1.0f + vexp(-twice));
    }
    if (activation == Activation::Relu2) {
        Floats kept = x < 0.0f ? Floats{} : x;
        return kept * kept;
    }
    if (activation == Activation::SwigluOai) {
        Floats bounded = x > kSwigluLimit ? all(kSwigluLimit) : x;
        return bounded / (1.0f + vexp(-kSwigluAlpha * bounded));
    }
    return x;
}

// The factor that multiplies the activated gate.
template <Activation activation>
ENGINE_INLINE Floats gate_factor(Floats up) {
    if (activation != Activation::SwigluOai) return up;
    Floats bounded = up > kSwigluLimit ? all(kSwigluLimit) : up;
    return 1.0f + (bounded < -kSwigluLimit ? all(-kSwigluLimit) : bounded);
}

// Applies activation and gate to the accumulators of a unit, in place. There are no branches, so
// the CPU can compute the vectors of the unit in parallel.
template <Activation activation, bool gated>
ENGINE_INLINE void activate_unit(float* sums) {
    for (int i = 0; i < kPanelRows; i += kLanes) {
        Floats value = activate<activation>(load(sums + i));
        store(sums + i, gated ? value * gate_factor<activation>(load(sums + kPanelRows + i)) : value);
    }
}

template <Activation activation>
ENGINE_INLINE void activate_unit(bool gated, float* sums) {
    gated ? activate_unit<activation, true>(sums) : activate_unit<activation, false>(sums);
}

ENGINE_INLINE void activate_unit(Activation activation, bool gated, float* sums) {
    switch (activation) {
        case Activation::Silu:
            return activate_unit<Activation::Silu>(gated, sums);
        case Activation::Gelu:
            return activate_unit<Activation::Gelu>(gated, sums);
        case Activation::GeluTanh:
            return activate_unit<Activation::GeluTanh>(gated, sums);
        case Activation::Relu2:
            return activate_unit<Activation::Relu2>(gated, sums);
        case Activation::SwigluOai:
            return activate_unit<Activation::SwigluOai>(gated, sums);
        default:
            if (gated) activate_unit<Activation::None, true>(sums);
    }
}

// Number of outputs per row of a unit: one panel, or a (gate, up) pair of panels. It is below 16
// only in the last unit of a matrix.
ENGINE_INLINE int unit_width(const MatmulJob& job, int unit) {
    int width = job.epilogue.gated ? job.weights->rows / 2 : job.weights->rows;
    int left = width - unit * kPanelRows;
    return left < kPanelRows ? left : kPanelRows;
}

// Prefetches the outputs of a unit for rows [row, row + rows). They are one cache line per row, and
// usually not in the cache yet.
ENGINE_INLINE void prefetch_outputs(const MatmulJob& job, int unit, int row, int rows) {
    const Epilogue& to = job.epilogue;
    const float* out = to.out + size_t(row) * size_t(to.stride) + size_t(unit) * kPanelRows;
    for (int r = 0; r < rows; r++) __builtin_prefetch(out + size_t(r) * size_t(to.stride), 1);
}

// Applies the epilogue to one row of a unit and stores the result. `sums` holds the 16 accumulators
// of the panel. If the epilogue is gated, it holds those of the gate panel, then those of the up
// panel.
__attribute__((noinline)) void apply_epilogue(const MatmulJob& job, int unit, int row, float* sums) {
    const Epilogue& to = job.epilogue;
    const int size = kPanelRows * (to.gated ? 2 : 1);
    if (to.delta) {
        const float* delta = to.delta + ptrdiff_t(row) * to.delta_stride + ptrdiff_t(unit) * size;
        for (int i = 0; i < size; i += kLanes) store(sums + i, load(sums + i) + load(delta + i));
    }
    if (to.bias) {
        const float* bias = to.bias + size_t(unit) * size_t(size);
        for (int i = 0; i < size; i += kLanes) store(sums + i, load(sums + i) + load(bias + i));
    }
    activate_unit(to.activation, to.gated, sums);
    float* out = to.out + size_t(row) * size_t(to.stride) + size_t(unit) * kPanelRows;
    const int width = unit_width(job, unit);
    const bool accumulates = to.residual;
    if (width < kPanelRows) {
        for (int i = 0; i < width; i++) out[i] = accumulates ? out[i] + sums[i] : sums[i];
    } else if (accumulates) {
        for (int i = 0; i < kPanelRows; i += kLanes) store(out + i, load(out + i) + load(sums + i));
    } else {
        for (int i = 0; i < kPanelRows; i += kLanes) store(out + i, load(sums + i));
    }
}

}  // namespace
}  // namespace engine
