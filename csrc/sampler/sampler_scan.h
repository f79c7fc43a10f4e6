// Functions of the sampler that scan one row of logits. Each instruction set has its own version.
#pragma once
#include "base/kernels.h"

namespace engine {

// A row of logits is cut into chunks. A chunk is a matrix of kColumnDepth rows and kColumns
// columns, and each column has one maximum. The column of maximum m has up to kColumnDepth logits:
// first_of(m) and every kColumns-th logit after it.
constexpr int kColumns = 16;
constexpr int kColumnDepth = 32;
constexpr int kChunkLogits = kColumns * kColumnDepth;

ENGINE_INLINE int num_maxima(int size) {
    return div_up(size, kChunkLogits) * kColumns;
}
ENGINE_INLINE int first_of(int maximum) {
    return maximum / kColumns * kChunkLogits + maximum % kColumns;
}

// Input of Gumbel-max sampling. The token with the largest logit / temperature + noise wins. Only
// tokens with rank * rank_scale >= floor take part.
struct GumbelJob {
    const float* logits;
    const uint32_t* words;  // one hash per token of the vocabulary
    const float* rank;      // one value per token, compared with `floor`
    float rank_scale, floor;
    float temperature;
    uint32_t key, odd_key;  // hash keys of the row
    int size;
    int first_guess;  // a token that is likely to win; a good guess saves time
};

struct ScanKernels {
    // out[i] = x[i] if bit i of `allowed` is set, else -infinity.
    void (*apply_mask)(const float* x, const uint32_t* allowed, int size, float* out);
    // Writes `num_maxima(size)` column maxima. NaN is never a maximum. A column that is all NaN has
    // maximum -infinity.
    void (*column_maxima)(const float* x, int size, float* maxima);
    // weights[i] = exp(x[i] / temperature - top), or 0 if x[i] is below `floor` or NaN. Returns the sum of
    // the weights.
    double (*exp_weights)(const float* x, int size, float floor, float temperature, float top,
                          float* weights);
    // Computes the probabilities weights[i] * scale, writes those in [low, high) to `out`, and
    // returns their number. `out` may be `weights`; otherwise it has room for size + 16 floats.
    int (*gather_probs)(const float* weights, int size, float scale, float low, float high, float* out);
    // Returns the sum of the probabilities that are at least `floor`.
    double (*mass_above)(const float* probs, int count, float floor);
    int (*gumbel_argmax)(const GumbelJob& job);
};

const ScanKernels& scan_kernels(const Kernels& kernels);

const ScanKernels& scan_kernels_generic();
const ScanKernels& scan_kernels_avx2();
const ScanKernels& scan_kernels_avx512();

}  // namespace engine
