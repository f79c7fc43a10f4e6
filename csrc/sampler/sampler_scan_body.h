// The code of the functions in sampler_scan.h. Each including file is compiled for one instruction
// set, which sets the vector width.
#pragma once
#include <math.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "sampler/sampler_scan.h"
#include "vector/vector_math.h"

namespace engine {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();
constexpr int kFlush = 32;  // number of vectors added in float before their sum is added to a double

// Loads up to kLanes values. Lanes past the end get the value `rest`.
template <class V, class T>
ENGINE_INLINE V load_up_to(const T* from, int left, T rest) {
    V value = V{} + rest;
    if (left >= kLanes)
        memcpy(&value, from, sizeof value);
    else
        memcpy(&value, from, size_t(left) * sizeof(T));
    return value;
}

ENGINE_INLINE unsigned lane_bits(Ints mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask(__m512i(mask));
#elif defined(__AVX2__)
    return unsigned(_mm256_movemask_ps(__m256(mask)));
#elif defined(__SSE2__)
    return unsigned(_mm_movemask_ps(__m128(mask)));
#else
    unsigned bits = 0;
    for (int i = 0; i < kLanes; i++) bits |= unsigned(mask[i] & 1) << i;
    return bits;
#endif
}

// Calls `pass(values, at, count)` for every vector of x. The last vector may have fewer than kLanes values;
// its other lanes are `rest`.
template <class F>
ENGINE_INLINE void for_vectors(const float* x, int size, float rest, const F& pass) {
    int at = 0;
    for (; at + kLanes <= size; at += kLanes) pass(load_up_to<Floats>(x + at, kLanes, rest), at, kLanes);
    if (at < size) pass(load_up_to<Floats>(x + at, size - at, rest), at, size - at);
}

// Sums up vectors. Up to kFlush vectors are added in float; their sums are added in double.
struct Total {
    Floats some = {};
    double lanes[kLanes] = {};
    int pending = 0;

    __attribute__((always_inline)) void add(Floats values) {
        some += values;
        if (++pending == kFlush) flush();
    }
    void flush() {
        for (int i = 0; i < kLanes; i++) lanes[i] += double(some[i]);
        some = Floats{};
        pending = 0;
    }
    double sum() {
        flush();
        double total = 0;
        for (int i = 0; i < kLanes; i++) total += lanes[i];
        return total;
    }
};

void apply_mask(const float* x, const uint32_t* allowed, int size, float* out) {
    Words bit;
    for (int i = 0; i < kLanes; i++) bit[i] = 1u << i;
    for_vectors(x, size, 0.0f, [&](Floats values, int at, int count) {
        Words word = Words{} + (allowed[at / 32] >> at % 32);
        Floats kept = (word & bit) != 0 ? values : Floats{} + kMinusInfinity;
        memcpy(out + at, &kept, size_t(count) * sizeof(float));
    });
}

void column_maxima(const float* x, int size, float* maxima) {
    constexpr int kVectors = kColumns / kLanes;
    for (int chunk = 0; chunk < size; chunk += kChunkLogits, maxima += kColumns) {
        Floats best[kVectors];
        for (Floats& each : best) each = Floats{} + kMinusInfinity;
        int left = size - chunk;
        for_vectors(x + chunk, left < kChunkLogits ? left : kChunkLogits, kMinusInfinity,
                    [&](Floats values, int at, int) {
                        Floats& column = best[at / kLanes % kVectors];
                        column = values > column ? values : column;
                    });
        memcpy(maxima, best, sizeof best);
    }
}

// exp(x) for x <= 0, with an error of at most 2 ulp. The result is 0 if x is below -87 or NaN.
ENGINE_INLINE Floats exp_negative(Floats x) {
    constexpr float kLog2e = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
    Ints in_range = x > -87.0f;
    Floats y = in_range ? x : Floats{};
    Floats shifted = y * kLog2e + kRoundShift;
    Floats n = shifted - kRoundShift;
    Floats r = y - n * kLn2High - n * kLn2Low;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Words power = Words(p) + (Words(shifted) << 23);
    return in_range ? Floats(power) : Floats{};
}

double exp_weights(const float* x, int size, float floor, float temperature, float top, float* weights) {
    Total total;
    for_vectors(x, size, kMinusInfinity, [&](Floats values, int at, int count) {
        Floats weight = exp_negative(values / temperature - top);
        weight = values >= floor ? weight : Floats{};
        memcpy(weights + at, &weight, size_t(count) * sizeof(float));
        total.add(weight);
    });
    return total.sum();
}

int gather_probs(const float* weights, int size, float scale, float low, float high, float* out) {
    int found = 0;
#if defined(__AVX512F__)
    for_vectors(weights, size, kMinusInfinity, [&](Floats values, int, int) {
        Floats probs = values * scale;
        unsigned kept = lane_bits((probs >= low) & (probs < high));
        _mm512_storeu_ps(out + found, _mm512_maskz_compress_ps(__mmask16(kept), __m512(probs)));
        found += __builtin_popcount(kept);
    });
#else
    for (int i = 0; i < size; i++) {
        float prob = weights[i] * scale;
        out[found] = prob;
        found += int(prob >= low) & int(prob < high);
    }
#endif
    return found;
}

double mass_above(const float* probs, int count, float floor) {
    Total total;
    for_vectors(probs, count, 0.0f,
                [&](Floats values, int, int) { total.add(values >= floor ? values : Floats{}); });
    return total.sum();
}

// Returns 31 random bits, a hash of the row's keys and the token's hash. They depend on all bits of
// both.
template <class W>
ENGINE_INLINE W noise_bits(W word, uint32_t key, uint32_t odd_key) {
    word ^= key;
    word *= odd_key;
    word ^= word >> 15;
    word *= 0x7feb352du;
    word ^= word >> 16;
    word *= 0x846ca68bu;
    return word & 0x7fffffffu;
}

float gumbel_score(const GumbelJob& job, int token) {
    uint32_t bits = noise_bits(job.words[token], job.key, job.odd_key);
    // A uniform variate in (0, 1). Its resolution is finest near 0, where it matters: the winner
    // has a small exponential variate -log(1 - uniform).
    float uniform = fminf(fmaxf(float(int32_t(bits)), 0.5f), 2147483520.0f) * 0x1p-31f;
    return job.logits[token] / job.temperature - logf(-log1pf(-uniform));
}

// Returns the winner of Gumbel-max sampling. A token can beat `best` only if its exponential
// variate is at most exp(logit / temperature - best). The uniform variate is a lower bound of the
// exponential variate. The code computes an upper bound of the exp without calling exp, by
// reinterpreting a scaled integer as a float. Only the few tokens whose uniform variate is below
// this bound need logarithms.
int gumbel_argmax(const GumbelJob& job) {
    constexpr float kPerUnit = 12102203.2f, kOne = 1065353216.0f, kBits = 21.4875626f;  // 31 ln 2
    float inverse = 1 / job.temperature;
    int winner = job.first_guess;
    float best = gumbel_score(job, winner);
    auto shift = [&] { return kBits + 1e-3f + 1e-6f * fabsf(best) - best; };
    Floats shifts = Floats{} + shift();
    for (int at = 0; at < job.size; at += kLanes) {
        int left = job.size - at;
        Floats x = load_up_to<Floats>(job.logits + at, left, kMinusInfinity);
        Floats rank = load_up_to<Floats>(job.rank + at, left, kMinusInfinity);
        Words words = load_up_to<Words>(job.words + at, left, 0u);
        Floats y = x * inverse + shifts;
        y = y > -80.0f ? y : Floats{} - 80.0f;
        y = y < 60.0f ? y : Floats{} + 60.0f;
        Floats bound = Floats(__builtin_convertvector(y * kPerUnit + kOne, Ints));
        Floats uniform = __builtin_convertvector(Ints(noise_bits(words, job.key, job.odd_key)), Floats);
        unsigned close = lane_bits((uniform <= bound) & (rank * job.rank_scale >= job.floor));
        if (left < kLanes) close &= (1u << left) - 1;
        for (; close; close &= close - 1) {
            int token = at + __builtin_ctz(close);
            float reached = gumbel_score(job, token);
            if (!(reached > best || (reached == best && token < winner))) continue;
            winner = token;
            best = reached;
            shifts = Floats{} + shift();
        }
    }
    return winner;
}

const ScanKernels kScanKernels = {apply_mask,   column_maxima, exp_weights,
                                  gather_probs, mass_above,    gumbel_argmax};

}  // namespace
}  // namespace engine
