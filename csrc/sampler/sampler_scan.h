// Passes over a whole row of logits, one version per instruction set.
#pragma once
#include "base/kernels.h"

namespace engine {

// Maximum m is that of up to kColumnDepth logits: first_of(m), and every kColumns-th after it.
constexpr int kColumns = 16;
constexpr int kColumnDepth = 32;
constexpr int kChunkLogits = kColumns * kColumnDepth;

ENGINE_INLINE int num_maxima(int size) {
    return div_up(size, kChunkLogits) * kColumns;
}
ENGINE_INLINE int first_of(int maximum) {
    return maximum / kColumns * kChunkLogits + maximum % kColumns;
}

// Tokens gumbel_argmax: the largest of logit / temperature + noise wins, among those with rank * scale >= floor.
struct GumbelJob {
    const float* logits;
    const uint32_t* words;  // of the tokens
    const float* rank;
    float rank_scale, floor;
    float temperature;
    uint32_t key, odd_key;  // of the row
    int size;
    int first_guess;  // a token that is likely to win: the better, the fewer are looked at closely
};

struct ScanKernels {
    // out[i] = allowed bit i ? x[i] : -infinity
    void (*apply_mask)(const float* x, const uint32_t* allowed, int size, float* out);
    // `num_maxima(size)` of them; NaN is never largest, and of nothing the largest is -infinity.
    void (*column_maxima)(const float* x, int size, float* maxima);
    // weights[i] = exp(x[i] / temperature - top), 0 where x[i] < floor or NaN; returns their sum.
    double (*exp_weights)(const float* x, int size, float floor, float temperature, float top,
                          float* weights);
    // The products weights[i] * scale in [low, high); `out` may be `weights`, else it has room for size + 16.
    int (*gather_probs)(const float* weights, int size, float scale, float low, float high, float* out);
    // The sum of the probs that are at min_prob `floor`.
    double (*mass_above)(const float* probs, int count, float floor);
    int (*gumbel_argmax)(const GumbelJob& job);
};

const ScanKernels& scan_kernels(const Kernels& kernels);

const ScanKernels& scan_kernels_generic();
const ScanKernels& scan_kernels_avx2();
const ScanKernels& scan_kernels_avx512();

}  // namespace engine
