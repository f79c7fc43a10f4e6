// Norms, RoPE, soft cap and reductions over logits. Each including file is compiled for one instruction set,
// which sets the vector width.
//
// Sums are accumulated in double, in each lane separately. The lanes are then added in a fixed
// order, so a sum depends only on the values.
#pragma once
#include <cmath>

#include "base/kernels.h"
#include "vector/vector_math.h"

namespace engine {
namespace {

constexpr int kWide = kLanes / 2;  // lanes of a vector of doubles
typedef float HalfFloats __attribute__((vector_size(4 * kWide)));
typedef double Doubles __attribute__((vector_size(8 * kWide)));
constexpr float kInfinity = __builtin_inff();

ENGINE_INLINE Doubles load_wide(const float* x) {
    HalfFloats half;
    memcpy(&half, x, sizeof half);
    return __builtin_convertvector(half, Doubles);
}

ENGINE_INLINE double sum_lanes(Doubles sums) {
    double total = 0;
    for (int i = 0; i < kWide; i++) total += sums[i];
    return total;
}

// Loads the last `count` < kLanes values of a row. The other lanes get the value `fill`.
ENGINE_INLINE Floats load_tail(const float* x, int count, float fill) {
    float values[kLanes];
    for (int i = 0; i < kLanes; i++) values[i] = i < count ? x[i] : fill;
    return load(values);
}

// Sum over i of term(x[i]). `term` takes Doubles.
template <class Term>
ENGINE_INLINE double sum_terms(const float* x, int size, Term term) {
    constexpr int kChains = 4;
    Doubles sums[kChains] = {};
    int i = 0;
    for (; i + kChains * kWide <= size; i += kChains * kWide)
        for (int c = 0; c < kChains; c++) sums[c] += term(load_wide(x + i + c * kWide));
    for (; i + kWide <= size; i += kWide) sums[0] += term(load_wide(x + i));
    double total = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < size; i++) total += term(Doubles{} + double(x[i]))[0];
    return total;
}

void rms_norm(const float* x, const float* weight, float eps, int size, float* out) {
    double squares = sum_terms(x, size, [](Doubles v) { return v * v; });
    float factor = float(1 / std::sqrt(squares / size + eps));
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < size; i++) out[i] = x[i] * factor * weight[i];
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int size, float* out) {
    double mean = sum_terms(x, size, [](Doubles v) { return v; }) / size;
    double squares = sum_terms(x, size, [mean](Doubles v) { return (v - mean) * (v - mean); });
    float factor = float(1 / std::sqrt(squares / size + eps)), center = float(mean);
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        Floats value = (load(x + i) - center) * factor * load(weight + i);
        store(out + i, bias ? value + load(bias + i) : value);
    }
    for (; i < size; i++) {
        float value = (x[i] - center) * factor * weight[i];
        out[i] = bias ? value + bias[i] : value;
    }
}

void rope(float* x, int heads, int head_dim, int dim, const float* cosines, const float* sines) {
    int half = dim / 2;
    for (int head = 0; head < heads; head++) {
        float *first = x + size_t(head) * size_t(head_dim), *second = first + half;
        int i = 0;
        for (; i + kLanes <= half; i += kLanes) {
            Floats a = load(first + i), b = load(second + i), c = load(cosines + i), s = load(sines + i);
            store(first + i, a * c - b * s);
            store(second + i, b * c + a * s);
        }
        for (; i < half; i++) {
            float a = first[i], b = second[i];
            first[i] = a * cosines[i] - b * sines[i];
            second[i] = b * cosines[i] + a * sines[i];
        }
    }
}

float max(const float* x, int size) {
    constexpr int kChains = 4;
    Floats best[kChains];
    for (Floats& lanes : best) lanes = all(-kInfinity);
    auto take = [](Floats& lanes, Floats value) { lanes = value > lanes ? value : lanes; };
    int i = 0;
    for (; i + kChains * kLanes <= size; i += kChains * kLanes)
        for (int c = 0; c < kChains; c++) take(best[c], load(x + i + c * kLanes));
    for (; i + kLanes <= size; i += kLanes) take(best[0], load(x + i));
    take(best[1], load_tail(x + i, size - i, -kInfinity));
    take(best[0], best[1]);
    take(best[2], best[3]);
    take(best[0], best[2]);
    float maximum = -kInfinity;
    for (int lane = 0; lane < kLanes; lane++) maximum = best[0][lane] > maximum ? best[0][lane] : maximum;
    return maximum;
}

ENGINE_INLINE bool any(Ints lanes) {
    uint64_t words[sizeof lanes / 8], seen = 0;
    memcpy(words, &lanes, sizeof lanes);
    for (uint64_t word : words) seen |= word;
    return seen != 0;
}

int argmax(const float* x, int size) {
    constexpr int kChains = 8;
    float maximum = max(x, size);
    int i = 0;
    for (; i + kChains * kLanes <= size; i += kChains * kLanes) {
        Ints same{};
        for (int c = 0; c < kChains; c++) same |= load(x + i + c * kLanes) == maximum;
        if (any(same)) break;
    }
    for (; i < size; i++)
        if (x[i] == maximum) return i;
    return 0;  // all values are NaN
}

// Groups of four terms are added in float. The sums of the groups are accumulated in double.
double sum_exp(const float* x, int size, float max, float scale) {
    constexpr int kStep = 4 * kLanes;
    Doubles sums[2] = {};
    auto add = [&](const float* values) {
        Floats terms[4];
        for (int c = 0; c < 4; c++) terms[c] = vexp((load(values + c * kLanes) - max) * scale);
        float partial[kLanes];
        store(partial, (terms[0] + terms[1]) + (terms[2] + terms[3]));
        sums[0] += load_wide(partial);
        sums[1] += load_wide(partial + kWide);
    };
    int i = 0;
    for (; i + kStep <= size; i += kStep) add(x + i);
    if (i < size) {
        float last[kStep];
        for (int k = 0; k < kStep; k++) last[k] = i + k < size ? x[i + k] : -kInfinity;
        add(last);
    }
    return sum_lanes(sums[0] + sums[1]);
}

bool all_finite(const float* x, int size) {
    constexpr int kChains = 4;
    constexpr int32_t kExponent = 0x7f800000;
    auto unusual = [](Floats value) { return ((Ints)value & kExponent) == kExponent; };
    Ints seen[kChains] = {};
    int i = 0;
    for (; i + kChains * kLanes <= size; i += kChains * kLanes)
        for (int c = 0; c < kChains; c++) seen[c] |= unusual(load(x + i + c * kLanes));
    for (; i + kLanes <= size; i += kLanes) seen[0] |= unusual(load(x + i));
    seen[1] |= unusual(load_tail(x + i, size - i, 0));
    return !any(seen[0] | seen[1] | seen[2] | seen[3]);
}

void softcap(float* x, int size, float cap) {
    const float factor = -2 / cap;
    auto capped = [&](Floats values) {
        Floats power = vexp((values < 0.0f ? -values : values) * factor);
        Floats result = (1.0f - power) / (1.0f + power) * cap;
        return values < 0.0f ? -result : result;
    };
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) store(x + i, capped(load(x + i)));
    Floats last = capped(load_tail(x + i, size - i, 0));
    for (int k = 0; i + k < size; k++) x[i + k] = last[k];
}

ENGINE_INLINE void fill_vector(Kernels& table) {
    table.rms_norm = rms_norm;
    table.layer_norm = layer_norm;
    table.rope = rope;
    table.softcap = softcap;
    table.argmax = argmax;
    table.max = max;
    table.sum_exp = sum_exp;
    table.all_finite = all_finite;
}

}  // namespace
}  // namespace engine
