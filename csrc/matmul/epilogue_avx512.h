// The epilogue of a matmul in AVX-512 registers: it applies bias, activation and gate to the
// accumulators and adds the residual. The last panel may have fewer than 16 channels.
#pragma once
#include <immintrin.h>

#include "base/kernels.h"
#include "vector/vector_math_avx512.h"

namespace engine {
namespace {

// Mask of the lanes of a unit that are outputs. Only the last unit may have padding lanes. If the
// epilogue is gated, `rows` of the matrix counts both gate and up rows.
ENGINE_INLINE __mmask16 output_lanes(const MatmulJob& job, int unit) {
    int width = job.epilogue.gated ? job.weights->rows / 2 : job.weights->rows;
    int left = width - unit * kPanelRows;
    return left >= kPanelRows ? __mmask16(0xffff) : __mmask16((1 << left) - 1);
}

// Adds what LoRA adapters add to the row, then the bias.
ENGINE_INLINE __m512 add_bias(const Epilogue& to, int panel, int row, __m512 sum) {
    if (to.delta) {
        const float* delta = to.delta + ptrdiff_t(row) * to.delta_stride + ptrdiff_t(panel) * kPanelRows;
        sum = _mm512_add_ps(sum, _mm512_loadu_ps(delta));
    }
    return to.bias ? _mm512_add_ps(sum, _mm512_loadu_ps(to.bias + panel * kPanelRows)) : sum;
}

// SiLU is x / (1 + exp(-x)). It is computed with a reciprocal estimate and one Newton step, which costs half as
// much as a division. The min keeps the estimate a normal number. NaN is the second operand of the min, which
// returns it unchanged.
ENGINE_INLINE __m512 silu(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512 power = vexp(_mm512_sub_ps(_mm512_setzero_ps(), x));
    __m512 divisor = _mm512_add_ps(_mm512_min_ps(_mm512_set1_ps(0x1p125f), power), one);
    __m512 inverse = _mm512_rcp14_ps(divisor);
    __m512 miss = _mm512_fnmadd_ps(divisor, inverse, one);
    return _mm512_mul_ps(x, _mm512_fmadd_ps(inverse, miss, inverse));
}

static inline __m512 activate(Activation activation, __m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f), half = _mm512_mul_ps(_mm512_set1_ps(0.5f), x);
    switch (activation) {
        case Activation::Silu:
            return silu(x);
        case Activation::Gelu: {
            __m512 inner = _mm512_mul_ps(x, _mm512_set1_ps(0.70710678f));
            return _mm512_fmadd_ps(half, verf(inner), half);
        }
        case Activation::GeluTanh: {
            __m512 square = _mm512_mul_ps(x, x);
            __m512 cubic = _mm512_fmadd_ps(square, _mm512_set1_ps(0.044715f), one);
            __m512 inner = _mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(0.79788456f));
            return _mm512_fmadd_ps(half, vtanh(inner), half);
        }
        case Activation::Relu2: {
            __m512 kept = _mm512_max_ps(_mm512_setzero_ps(), x);  // NaN is the second operand and survives
            return _mm512_mul_ps(kept, kept);
        }
        case Activation::SwigluOai: {
            __m512 bounded = _mm512_min_ps(_mm512_set1_ps(kSwigluLimit), x);
            __m512 power = vexp(_mm512_mul_ps(_mm512_set1_ps(-kSwigluAlpha), bounded));
            return _mm512_div_ps(bounded, _mm512_add_ps(power, one));
        }
        default:
            return x;
    }
}

// The factor that multiplies the activated gate.
ENGINE_INLINE __m512 gate_factor(Activation activation, __m512 up) {
    if (activation != Activation::SwigluOai) return up;
    const __m512 limit = _mm512_set1_ps(kSwigluLimit), lowest = _mm512_set1_ps(-kSwigluLimit);
    return _mm512_add_ps(_mm512_max_ps(lowest, _mm512_min_ps(limit, up)), _mm512_set1_ps(1.0f));
}

ENGINE_INLINE void store_lanes(const Epilogue& to, int unit, int row, __mmask16 lanes, __m512 value) {
    float* out = to.out + size_t(row) * size_t(to.stride) + size_t(unit) * kPanelRows;
    if (to.residual) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(lanes, out));
    _mm512_mask_storeu_ps(out, lanes, value);
}

// Prefetches the outputs of a unit for rows [row, row + rows). They are one cache line per row, and usually not
// in the cache yet.
ENGINE_INLINE void prefetch_outputs(const Epilogue& to, int unit, int row, int rows) {
    const float* out = to.out + size_t(row) * size_t(to.stride) + size_t(unit) * kPanelRows;
    for (int r = 0; r < rows; r++) __builtin_prefetch(out + size_t(r) * size_t(to.stride), 1);
}

// Applies the epilogue to one row of one panel, if the epilogue is not gated.
ENGINE_INLINE void store_row(const Epilogue& to, int panel, int row, __mmask16 lanes, __m512 sum) {
    store_lanes(to, panel, row, lanes, activate(to.activation, add_bias(to, panel, row, sum)));
}

// Applies the epilogue to one row of a (gate, up) pair of panels.
ENGINE_INLINE void store_gated_row(const Epilogue& to, int pair, int row, __mmask16 lanes, __m512 gate,
                                   __m512 up) {
    gate = activate(to.activation, add_bias(to, 2 * pair, row, gate));
    up = gate_factor(to.activation, add_bias(to, 2 * pair + 1, row, up));
    store_lanes(to, pair, row, lanes, _mm512_mul_ps(gate, up));
}

// Where the results of two adjacent panels, or of a single last panel, are stored.
struct PairOutput {
    const Epilogue& to;
    int panel;  // the first panel
    bool is_single;
    __mmask16 lanes[2];
};

ENGINE_INLINE PairOutput pair_output(const MatmulJob& job, int panel, bool is_single) {
    int unit = job.epilogue.gated ? panel / 2 : panel;
    bool has_next = !is_single && !job.epilogue.gated;
    __mmask16 next = has_next ? output_lanes(job, unit + 1) : __mmask16(0);
    return {job.epilogue, panel, is_single, {output_lanes(job, unit), next}};
}

// Applies the epilogue to one row of two panels. `first` and `second` are their accumulators;
// `second` is ignored if there is only one panel.
ENGINE_INLINE void store_pair_row(const PairOutput& pair, int row, __m512 first, __m512 second) {
    if (pair.to.gated) return store_gated_row(pair.to, pair.panel / 2, row, pair.lanes[0], first, second);
    store_row(pair.to, pair.panel, row, pair.lanes[0], first);
    if (!pair.is_single) store_row(pair.to, pair.panel + 1, row, pair.lanes[1], second);
}

// Calls f with a function that does what `store_pair_row` does, for the rows of one pair. The two most frequent
// epilogues have functions without branches, and their activation is inlined.
template <class F>
ENGINE_INLINE void with_store(const PairOutput& pair, F f) {
    const Epilogue& to = pair.to;
    const size_t stride = size_t(to.stride);
    const bool is_whole = pair.lanes[0] == 0xffff && !to.bias && !to.delta;
    if (is_whole && to.gated && to.activation == Activation::Silu && !to.residual) {
        float* out = to.out + size_t(pair.panel / 2) * kPanelRows;
        return f([=](int row, __m512 gate, __m512 up) __attribute__((always_inline)) {
            _mm512_storeu_ps(out + size_t(row) * stride, _mm512_mul_ps(silu(gate), up));
        });
    }
    if (is_whole && !to.gated && to.activation == Activation::None && !pair.is_single &&
        pair.lanes[1] == 0xffff) {
        float* out = to.out + size_t(pair.panel) * kPanelRows;
        const __mmask16 adds = to.residual ? 0xffff : 0;
        return f([=](int row, __m512 first, __m512 second) __attribute__((always_inline)) {
            float* at = out + size_t(row) * stride;
            _mm512_storeu_ps(at, _mm512_mask_add_ps(first, adds, first, _mm512_maskz_loadu_ps(adds, at)));
            _mm512_storeu_ps(
                at + kPanelRows,
                _mm512_mask_add_ps(second, adds, second, _mm512_maskz_loadu_ps(adds, at + kPanelRows)));
        });
    }
    f([&](int row, __m512 first, __m512 second)
          __attribute__((always_inline)) { store_pair_row(pair, row, first, second); });
}

}  // namespace
}  // namespace engine
