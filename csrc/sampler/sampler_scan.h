// Passes over one row of logits, with one version per instruction set.
#pragma once
#include "base/kernels.h"

namespace engine {

// Maximum m covers up to kColumnDepth logits: first_of(m) and every kColumns-th after it.
constexpr int kColumns = 16;
constexpr int kColumnDepth = 32;
constexpr int kChunkLogits = kColumns * kColumnDepth;

ENGINE_INLINE int num_maxima(int size) {
    return div_up(size, kChunkLogits) * kColumns;
}
ENGINE_INLINE int first_of(int maximum) {
    return maximum / kColumns * kChunkLogits + maximum % kColumns;
}

// Gumbel-max sampling: the largest logit / temperature + noise wins, among tokens with rank * rank_scale >=
// floor.
struct GumbelJob {
    const float* logits;
    const uint32_t* words;  // token hashes
    const float* rank;
    float rank_scale, floor;
    float temperature;
    uint32_t key, odd_key;  // of the row
    int size;
    int first_guess;  // a likely winner; a good guess leaves fewer tokens to score
};

struct ScanKernels {
    // out[i] = allowed bit i ? x[i] : -infinity
    void (*apply_mask)(const float* x, const uint32_t* allowed, int size, float* out);
    // Writes `num_maxima(size)` maxima. NaN is never the maximum; the maximum of nothing is -infinity.
    void (*column_maxima)(const float* x, int size, float* maxima);
    // weights[i] = exp(x[i] / temperature - top), or 0 if x[i] < floor or NaN. Returns their sum.
    double (*exp_weights)(const float* x, int size, float floor, float temperature, float top,
                          float* weights);
    // Collects the values weights[i] * scale in [low, high). `out` may be `weights`; otherwise it has room
    // for size + 16.
    int (*gather_probs)(const float* weights, int size, float scale, float low, float high, float* out);
    // The sum of the probabilities >= `floor`.
    double (*mass_above)(const float* probs, int count, float floor);
    int (*gumbel_argmax)(const GumbelJob& job);
};

const ScanKernels& scan_kernels(const Kernels& kernels);

const ScanKernels& scan_kernels_generic();
const ScanKernels& scan_kernels_avx2();
const ScanKernels& scan_kernels_avx512();

}  // namespace engine
