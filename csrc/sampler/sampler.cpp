#include "sampler/sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>

#include "sampler/sampler_scan.h"

namespace engine {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// A hash function. It is a bijection of 64-bit words in which every output bit depends on every
// input bit.
uint64_t mix(uint64_t x) {
    x = (x + 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 29)) * 0x94d049bb133111eb;
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93;
    return x ^ (x >> 32);
}

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(std::string("sampling: ") + what + " out of bounds");
}

bool all_within(const int32_t* values, int count, int low, int end) {
    return std::all_of(values, values + count, [=](int32_t value) { return value >= low && value < end; });
}

// Calls `found(i)` for every logit that is at least `floor`. `maxima` has the maximum of each
// column; a column is every kColumns-th logit of a chunk. Columns whose maximum is below `floor`
// are skipped.
template <class F>
void for_large(const float* x, int size, float floor, const std::vector<float>& maxima, const F& found) {
    for (int column = 0; column < int(maxima.size()); column++) {
        if (maxima[size_t(column)] < floor) continue;
        int first = first_of(column), end = std::min(size, first + kChunkLogits);
        for (int i = first; i < end; i += kColumns)
            if (x[i] >= floor) found(i);
    }
}

// Returns the k-th largest logit, or -infinity if fewer than k logits are numbers. Leaves the column maxima
// in the scratch memory. The k-th largest column maximum is a lower bound of the result, so few columns need
// a full scan.
float kth_largest(const ScanKernels& scan, const float* x, int size, int k, SampleScratch& scratch) {
    scan.column_maxima(x, size, scratch.maxima.data());
    float bound = kMinusInfinity;
    auto larger = std::greater<float>();
    std::vector<float>& ranked = scratch.ranked_maxima;
    if (size_t(k) <= ranked.size()) {
        ranked = scratch.maxima;
        std::nth_element(ranked.begin(), ranked.begin() + (k - 1), ranked.end(), larger);
        bound = ranked[size_t(k - 1)];
    }
    float* values = scratch.values.data();
    int count = 0;
    for_large(x, size, bound, scratch.maxima, [&](int i) { values[count++] = x[i]; });
    if (count < k) return kMinusInfinity;
    std::nth_element(values, values + (k - 1), values + count, larger);
    return values[k - 1];
}

// Writes the token ids of the k largest logits to the scratch memory, largest logit first. Among equal
// logits, the lower id comes first. Returns the number of ids.
int top_tokens(const ScanKernels& scan, const float* x, int size, int k, SampleScratch& scratch) {
    float floor = kth_largest(scan, x, size, k, scratch);
    int32_t* ids = scratch.ids.data();
    int count = 0;
    for_large(x, size, floor, scratch.maxima, [&](int i) { ids[count++] = i; });
    k = std::min(k, count);
    std::partial_sort(ids, ids + k, ids + count,
                      [x](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
    return k;
}

// Returns the top-p threshold: the largest probability such that the tokens at or above it sum to
// at least `target`. The threshold is found by bisection over the bits of a float, because positive
// floats are ordered like their bits. The last 7 bits stay 0, so tokens whose probabilities agree
// to one part in 65,536 count as equally likely. `probs` holds the probabilities in [min_prob,
// best], whose sum is known to reach the target. The function overwrites `probs`.
float nucleus_floor(const ScanKernels& scan, float* probs, int count, float min_prob, float best,
                    float target) {
    float low = 0x1p-63f, high = 2;            // bounds of the threshold
    double mass_at_high = 0, mass_passed = 0;  // sums: at or above `high`; removed from `probs`
    for (int bit = 28; bit >= 7; bit--) {      // the bits in which floats in 2^-63 .. 1 differ
        float middle = bits_to_float(float_to_bits(low) | 1u << bit);
        if (middle > best) continue;
        double mass = middle > min_prob ? mass_passed + scan.mass_above(probs, count, middle) : 1;
        if (mass >= double(target)) {
            low = middle;
        } else {
            high = middle;
            mass_at_high = mass;
        }
        if (bit == 23 || bit == 16) {  // 23: the exponent is known; 16: 7 mantissa bits too
            count = scan.gather_probs(probs, count, 1, low, high, probs);
            mass_passed = mass_at_high;
        }
    }
    return low;
}

}  // namespace

const ScanKernels& scan_kernels(const Kernels& kernels) {
    [[maybe_unused]] const auto is = [&](const char* name) { return !strcmp(kernels.name, name); };
#if defined(ENGINE_AVX2)
    if (is("avx2") || is("avx_vnni")) return scan_kernels_avx2();
#endif
#if defined(ENGINE_AVX512)
    if (!is("generic")) return scan_kernels_avx512();
#endif
    return scan_kernels_generic();
}

SampleScratch::SampleScratch(int vocab)
    : adjusted(size_t(vocab)),
      values(size_t(vocab) + 16),
      weights(size_t(vocab)),
      maxima(size_t(num_maxima(vocab))),
      ranked_maxima(maxima.size()),
      ids(size_t(vocab)),
      seen(size_t(vocab)) {}

Sampler::Sampler(int vocab, int max_slots, int max_seq_len)
    : vocab_(vocab),
      max_slots_(max_slots),
      max_seq_len_(max_seq_len),
      words_(size_t(vocab)),
      // There is one column more than max_seq_len, for the token sampled after the last position.
      // It is sampled, but the model never computes it.
      history_(size_t(max_slots) * size_t(max_seq_len + 1) * sizeof(int32_t)),
      num_prompt_(size_t(max_slots)) {
    for (size_t token = 0; token < words_.size(); token++) words_[token] = uint32_t(mix(token));
}

int32_t* Sampler::tokens_of(int slot) const {
    return reinterpret_cast<int32_t*>(history_.data()) + size_t(slot) * size_t(max_seq_len_ + 1);
}

bool Sampler::is_penalized(int row) const {
    return in_.repetition[row] != 1 || in_.presence[row] != 0 || in_.frequency[row] != 0;
}

void Sampler::check(const SamplingArrays& in, const SampledArrays& out) const {
    require(all_within(in.slots, in.rows, 0, max_slots_), "slots");
    require(all_within(in.position, in.rows, 0, max_seq_len_ + 1), "position");
    require(all_within(in.forced, in.rows, kNotForced, vocab_), "forced");
    require(all_within(in.bias_rows, in.biases, 0, in.rows), "bias_rows");
    require(all_within(in.bias_ids, in.biases, 0, vocab_), "bias_ids");
    require(!in.mask || in.mask_words == div_up(vocab_, 32), "mask");
    bool tells = !all_within(in.num_logprobs, in.rows, -1, 0);
    require(all_within(in.num_logprobs, in.rows, -1, out.top_width + 1), "num_logprobs");
    require(out.top_width <= vocab_ && (!tells || out.logprobs), "num_logprobs");
    require(all_within(in.history_slots, in.histories, 0, max_slots_), "history_slots");
    for (int h = 0; h < in.histories; h++) {
        int length = in.history_start[h + 1] - in.history_start[h];
        require(in.history_start[h] >= 0 && length >= 0 && length <= max_seq_len_ + 1, "history_start");
        require(all_within(in.history_tokens + in.history_start[h], length, 0, vocab_), "history_tokens");
    }
}

void Sampler::begin(const SamplingArrays& inputs, const SampledArrays& outputs) {
    check(inputs, outputs);
    in_ = inputs;
    out_ = outputs;
    for (int h = 0; h < in_.histories; h++) {
        int slot = in_.history_slots[h];
        num_prompt_[size_t(slot)] = in_.history_num_prompt[h];
        std::copy(in_.history_tokens + in_.history_start[h], in_.history_tokens + in_.history_start[h + 1],
                  tokens_of(slot));
    }
    has_penalties_ = false;
    for (int row = 0; row < in_.rows; row++) has_penalties_ = has_penalties_ || is_penalized(row);
    index_biases();
}

// Groups the logit biases by row. Within a row they keep their order.
void Sampler::index_biases() {
    bias_start_.assign(size_t(in_.rows) + 1, 0);
    bias_order_.resize(size_t(in_.biases));
    for (int i = 0; i < in_.biases; i++) bias_start_[size_t(in_.bias_rows[i]) + 1]++;
    for (size_t row = 0; row < size_t(in_.rows); row++) bias_start_[row + 1] += bias_start_[row];
    for (int i = in_.biases - 1; i >= 0; i--)
        bias_order_[size_t(--bias_start_[size_t(in_.bias_rows[i]) + 1])] = i;
    // The loop above moved the end of each row down to its beginning. So bias_start_[row + 1] has
    // the start of `row`.
    for (size_t row = 0; row < size_t(in_.rows); row++) bias_start_[row] = bias_start_[row + 1];
    bias_start_[size_t(in_.rows)] = in_.biases;
}

void Sampler::sample_row(const Kernels& kernels, const float* logits, int row, SampleScratch& scratch) const {
    int32_t token = in_.forced[row];
    if (token == kNotForced) {
        const float* adjusted = adjust(kernels, logits, row, scratch);
        token = in_.temperature[row] == 0 ? kernels.argmax(adjusted, vocab_)
                                          : sample_token(kernels, adjusted, row, scratch);
    }
    out_.tokens[row] = token;
    if (in_.num_logprobs[row] >= 0) write_logprobs(kernels, logits, row, scratch);
}

void Sampler::end() {
    for (int row = 0; row < in_.rows; row++) {
        if (!has_penalties_ || in_.forced[row] != kNotForced) continue;
        tokens_of(in_.slots[row])[in_.position[row]] = out_.tokens[row];
    }
    in_ = SamplingArrays();
    out_ = SampledArrays();
}

const float* Sampler::adjust(const Kernels& kernels, const float* logits, int row,
                             SampleScratch& scratch) const {
    int begin = bias_start_[size_t(row)], end = bias_start_[size_t(row) + 1];
    if (begin == end && !in_.mask && !is_penalized(row)) return logits;
    float* adjusted = scratch.adjusted.data();
    std::copy(logits, logits + vocab_, adjusted);
    if (is_penalized(row)) penalize(adjusted, row, scratch);
    for (int i = begin; i < end; i++) {
        int bias = bias_order_[size_t(i)];
        adjusted[in_.bias_ids[bias]] += in_.bias_values[bias];
    }
    if (in_.mask) {
        const uint32_t* allowed = in_.mask + size_t(row) * size_t(in_.mask_words);
        scan_kernels(kernels).apply_mask(adjusted, allowed, vocab_, adjusted);
    }
    return adjusted;
}

// The repetition penalty covers prompt and output. Frequency and presence penalties cover the output only.
void Sampler::penalize(float* logits, int row, SampleScratch& scratch) const {
    const int32_t* tokens = tokens_of(in_.slots[row]);
    int length = in_.position[row], num_prompt = num_prompt_[size_t(in_.slots[row])];
    float repetition = in_.repetition[row];
    int32_t* seen = scratch.seen.data();  // 1 if the token occurs, plus 2 per occurrence in the output
    for (int i = 0; i < length; i++) seen[tokens[i]] = (seen[tokens[i]] | 1) + (i >= num_prompt ? 2 : 0);
    for (int i = 0; i < length; i++) {
        int32_t token = tokens[i];
        if (!seen[token]) continue;
        float count = float(seen[token] >> 1), value = logits[token];
        value = value > 0 ? value / repetition : value * repetition;
        value -= in_.frequency[row] * count;
        if (count > 0) value -= in_.presence[row];
        logits[token] = value;
        seen[token] = 0;
    }
}

int Sampler::sample_token(const Kernels& kernels, const float* logits, int row,
                          SampleScratch& scratch) const {
    const ScanKernels& scan = scan_kernels(kernels);
    float temperature = in_.temperature[row], top_p = in_.top_p[row], min_p = in_.min_p[row];
    int best = kernels.argmax(logits, vocab_), top_k = in_.top_k[row];
    float top = logits[best] / temperature;
    if (!std::isfinite(top)) return best;
    float floor = kMinusInfinity;
    if (top_k > 0 && top_k < vocab_) floor = kth_largest(scan, logits, vocab_, top_k, scratch);
    uint64_t key = mix(uint64_t(in_.seed[row]));
    key = mix(key ^ uint64_t(int64_t(in_.choice[row])));
    key = mix(key ^ uint64_t(int64_t(in_.position[row])) << 32);
    GumbelJob job{
        logits, words_.data(), logits, 1, floor, temperature, uint32_t(key >> 32), uint32_t(key) | 1,
        vocab_, best};
    if (top_p < 1 || min_p > 0) {
        float* weights = scratch.weights.data();
        // The probability of a token is its weight times prob_scale. The likeliest token has weight
        // 1.
        float prob_scale = float(1 / scan.exp_weights(logits, vocab_, floor, temperature, top, weights));
        job.rank = weights;
        job.rank_scale = prob_scale;
        job.floor = prob_scale * min_p;
        if (top_p < 1) {
            // Tokens below min_prob can be ignored: even all of them together have less than the mass
            // of 1 - top_p that top-p drops.
            float min_prob = (1 - top_p) / float(vocab_) / 2;
            float* probs = scratch.values.data();
            int count = scan.gather_probs(weights, vocab_, prob_scale, min_prob, 2, probs);
            job.floor = std::max(job.floor, nucleus_floor(scan, probs, count, min_prob, prob_scale, top_p));
        }
    }
    return scan.gumbel_argmax(job);
}

void Sampler::write_logprobs(const Kernels& kernels, const float* logits, int row,
                             SampleScratch& scratch) const {
    float best = logits[kernels.argmax(logits, vocab_)];
    float total = float(double(best) + std::log(kernels.sum_exp(logits, vocab_, best, 1)));
    out_.logprobs[row] = logits[out_.tokens[row]] - total;
    int wanted = in_.num_logprobs[row];
    if (!wanted) return;
    int found = top_tokens(scan_kernels(kernels), logits, vocab_, wanted, scratch);
    for (int i = 0; i < wanted; i++) {
        size_t where = size_t(row) * size_t(out_.top_width) + size_t(i);
        int32_t id = i < found ? scratch.ids[size_t(i)] : 0;
        out_.top_ids[where] = id;
        out_.top_logprobs[where] = i < found ? logits[id] - total : kMinusInfinity;
    }
}

}  // namespace engine
