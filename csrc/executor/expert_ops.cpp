// The executor's ops for a mixture of experts.
#include <algorithm>
#include <cmath>

#include "executor/executor.h"

namespace engine {
namespace {

constexpr int kClaims = 8;     // min claims per thread and round, for load balance
constexpr int kMaxGrain = 16;  // max units that a thread claims at a time

}  // namespace

void Executor::route_rows(const Op& op, int begin, int end, float* scratch) {
    for (int r = begin; r < end; r++)
        route(op.routing, at(op.source, r), op.num_experts, scratch, at(op.out, r));
}

void Executor::gate_rows(const Op& op, int begin, int end) {
    const int size = width(op.out), step = width(op.source) > 1 ? 1 : 0;
    for (int r = begin; r < end; r++) {
        const float* gates = at(op.source, r);
        float gate = 1 / (1 + std::exp(-gates[0]));
        float* out = at(op.out, r);
        for (int i = 0; i < size; i++) {
            if (step) gate = 1 / (1 + std::exp(-gates[i]));
            out[i] *= gate;
        }
    }
}

// Computes units [begin, end) of all GEMMs, which are numbered GEMM by GEMM.
void Executor::multiply_experts(const Op& op, bool is_up, int begin, int end, uint8_t* scratch) {
    const ExpertMatrices& matrices = is_up ? op.up : op.down;
    const int units = op.expert_units(is_up);
    while (begin < end) {
        const ExpertBatch::Gemm& gemm = expert_batch_.gemm(begin / units);
        const int first = begin % units, last = std::min(first + end - begin, units);
        Epilogue epilogue{is_up ? expert_batch_.inner(gemm.first) : expert_batch_.result(gemm.first),
                          is_up ? expert_batch_.inner_width() : expert_batch_.result_width(),
                          matrices.bias_of(gemm.expert),
                          is_up ? op.activation : Activation::None,
                          is_up,
                          false};
        const Matrix matrix = matrices.matrix(gemm.expert);
        MatmulJob job{&matrix, expert_batch_.input(is_up ? gemm.up_input : gemm.down_input), gemm.rows,
                      epilogue};
        kernels_.matmul[int(matrices.numerics(gemm.is_prefill))](job, first, last, scratch);
        begin += last - first;
    }
}

void Executor::experts(const Op& op, int thread, int& index) {
    const int decode = op.over_logits ? batch_->decode_logits : batch_->decode_tokens;
    round(thread, index, [&](int, int) {
        expert_batch_.assign(kernels_, op, at(op.weights, 0), rows_of(op), decode);
        for (bool is_up : {true, false}) {
            int units = expert_batch_.num_gemms() * op.expert_units(is_up);
            int grain = std::clamp(units / (pool_.size() * kClaims), 1, kMaxGrain);
            rounds_[size_t(index + (is_up ? 2 : 4))] = {units, grain};
        }
    });
    for (bool is_up : {true, false}) {
        const ExpertMatrices& matrices = is_up ? op.up : op.down;
        round(thread, index, [&](int begin, int end) {
            for (int row = begin; row < std::min(end, expert_batch_.num_rows()); row++) {
                const ExpertBatch::Gemm& gemm = expert_batch_.gemm_of_row(row);
                const float* x = is_up ? at(op.source, expert_batch_.token(row)) : expert_batch_.inner(row);
                const int place = row - gemm.first;
                // `x` is the single row `place`, so the stride is 0.
                kernels_.pack[int(matrices.numerics(gemm.is_prefill))](
                    x, 0, matrices.first.columns, gemm.rows, place, place + 1,
                    expert_batch_.input(is_up ? gemm.up_input : gemm.down_input));
            }
        });
        round(thread, index,
              [&](int begin, int end) { multiply_experts(op, is_up, begin, end, scratch(thread)); });
    }
    round(thread, index, [&](int begin, int end) {
        const int size = width(op.out);
        for (int token = begin; token < end; token++) {
            float* out = at(op.out, token);
            if (!op.residual) std::fill(out, out + size, 0.0f);
            expert_batch_.combine(token, op.scale, size, out);
        }
    });
}

}  // namespace engine
