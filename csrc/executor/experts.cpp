#include "executor/experts.h"

#include <algorithm>
#include <cmath>

namespace engine {
namespace {

constexpr float kNever = -__builtin_inff();

// Index of the first maximum. If all values are NaN or minus infinity, it is `begin`.
int first_max(const float* x, int begin, int end) {
    int best = begin;
    for (int i = begin + 1; i < end; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

void softmax(const float* logits, int count, float* out) {
    float max = logits[first_max(logits, 0, count)], sum = 0;
    for (int i = 0; i < count; i++) sum += out[i] = std::exp(logits[i] - max);
    for (int i = 0; i < count; i++) out[i] /= sum;
}

// What ranks a group of experts: the best rank, or the sum of the best two.
float group_rank(const Routing& routing, const float* ranks, int begin, int end) {
    int best = first_max(ranks, begin, end);
    if (!routing.best_two) return ranks[best];
    float second = kNever;
    for (int i = begin; i < end; i++)
        if (i != best) second = std::max(second, ranks[i]);
    return ranks[best] + second;
}

// Excludes the experts outside the best groups.
void limit_groups(const Routing& routing, int experts, float* ranks) {
    int size = experts / routing.groups;
    std::vector<float> of_group;
    for (int g = 0; g < routing.groups; g++)
        of_group.push_back(group_rank(routing, ranks, g * size, (g + 1) * size));
    std::vector<char> kept(size_t(routing.groups), 0);
    for (int i = 0; i < routing.groups_per_token; i++) {
        int best = first_max(of_group.data(), 0, routing.groups);
        kept[size_t(best)] = 1;
        of_group[size_t(best)] = kNever;
    }
    for (int e = 0; e < experts; e++)
        if (!kept[size_t(e / size)]) ranks[e] = kNever;
}

void grow(Block& block, size_t bytes) {
    if (bytes > block.size()) block = Block(2 * bytes);
}

}  // namespace

void route(const Routing& routing, const float* logits, int experts, float* scratch, float* weights) {
    float *scores = scratch, *ranks = scratch + experts;
    if (routing.scoring == Routing::Scoring::Softmax)
        softmax(logits, experts, scores);
    else if (routing.scoring == Routing::Scoring::Sigmoid)
        for (int e = 0; e < experts; e++) scores[e] = 1 / (1 + std::exp(-logits[e]));
    else
        std::copy(logits, logits + experts, scores);
    for (int e = 0; e < experts; e++)
        ranks[e] = routing.correction ? scores[e] + routing.correction[e] : scores[e];
    if (routing.groups > 1) limit_groups(routing, experts, ranks);
    std::fill(weights, weights + experts, 0.0f);
    float sum = 0, max = 0;
    for (int i = 0; i < routing.per_token; i++) {
        int best = first_max(ranks, 0, experts);
        ranks[best] = kNever;
        if (i == 0) max = scores[best];
        float score =
            routing.scoring == Routing::Scoring::SoftmaxChosen ? std::exp(scores[best] - max) : scores[best];
        weights[best] = score;
        sum += score;
    }
    bool divides = routing.renormalizes || routing.scoring == Routing::Scoring::SoftmaxChosen;
    float factor = divides ? routing.scale / sum : routing.scale;
    for (int e = 0; e < experts; e++) weights[e] *= factor;
}

void ExpertBatch::assign(const Kernels& kernels, const Op& op, const float* weights, int tokens,
                         int decode_tokens) {
    const int experts = op.num_experts;
    const bool splits = op.up.decode != op.up.prefill || op.down.decode != op.down.prefill;
    auto kind_of = [&](int expert, int token) {
        return size_t(2 * expert + (splits && token >= decode_tokens ? 1 : 0));
    };
    starts_.assign(size_t(2 * experts) + 1, 0);
    token_starts_.assign(size_t(tokens) + 1, 0);
    for (int token = 0; token < tokens; token++) {
        const float* row = weights + size_t(token) * size_t(experts);
        int chosen = 0;
        for (int e = 0; e < experts; e++) {
            if (row[e] == 0) continue;
            starts_[kind_of(e, token) + 1]++;
            chosen++;
        }
        token_starts_[size_t(token) + 1] = token_starts_[size_t(token)] + chosen;
    }
    const size_t total = size_t(token_starts_[size_t(tokens)]);
    gemms_.clear();
    gemm_of_.clear();
    size_t up_bytes = 0, down_bytes = 0;
    for (int kind = 0; kind < 2 * experts; kind++) {
        int rows = starts_[size_t(kind) + 1], first = starts_[size_t(kind)];
        starts_[size_t(kind) + 1] += first;
        if (rows == 0) continue;
        const bool is_prefill = kind % 2 == 1;
        gemm_of_.insert(gemm_of_.end(), size_t(rows), num_gemms());
        gemms_.push_back({kind / 2, is_prefill, first, rows, up_bytes, down_bytes});
        auto packed = [&](const ExpertMatrices& matrices) {
            auto bytes = kernels.packed_bytes[int(matrices.numerics(is_prefill))];
            return round_up_size(bytes(rows, matrices.first.columns), 64);
        };
        up_bytes += packed(op.up);
        down_bytes += packed(op.down);
    }
    token_of_.resize(total);
    rows_of_token_.clear();
    for (int token = 0; token < tokens; token++)
        for (int e = 0; e < experts; e++) {
            float weight = weights[size_t(token) * size_t(experts) + size_t(e)];
            if (weight == 0) continue;
            int32_t row = starts_[kind_of(e, token)]++;
            token_of_[size_t(row)] = token;
            rows_of_token_.push_back({row, weight});
        }
    inner_width_ = round_up(op.down.first.columns, kPanelRows);
    result_width_ = round_up(op.down.first.rows, kPanelRows);
    grow(input_, std::max(up_bytes, down_bytes));
    grow(inner_, total * size_t(inner_width_) * sizeof(float));
    grow(result_, total * size_t(result_width_) * sizeof(float));
}

void ExpertBatch::combine(int token, float scale, int size, float* __restrict out) const {
    for (int i = token_starts_[size_t(token)]; i < token_starts_[size_t(token) + 1]; i++) {
        const Row& row = rows_of_token_[size_t(i)];
        const float weight = row.weight * scale;
        const float* __restrict from = result(row.row);
        for (int k = 0; k < size; k++) out[k] += weight * from[k];
    }
}

}  // namespace engine
