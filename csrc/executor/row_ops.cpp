// Ops that compute one row after another: the embedding lookup, norms, the gathering of rows and their means.
#include <algorithm>
#include <cmath>

#include "executor/executor.h"

namespace engine {

void Executor::embed(const Op& op, int begin, int end) {
    int size = op.matrix->columns;
    for (int token = begin; token < end; token++) {
        float* out = at(op.out, token);
        if (batch_->embeds && batch_->embeds[token]) {
            memcpy(out, batch_->embeds[token], size_t(size) * sizeof(float));
            continue;
        }
        kernels_.embed(*op.matrix, batch_->token_ids[token], out);
        if (batch_->num_runs > 0) add_to_embedding(token, size, out);
        if (op.scale != 1)
            for (int i = 0; i < size; i++) out[i] *= op.scale;
        add_positions(op, token, token + 1);
    }
}

void Executor::add_positions(const Op& op, int begin, int end) {
    int size = op.matrix->columns;
    for (int token = begin; token < end; token++) {
        if (batch_->embeds && batch_->embeds[token]) continue;
        float* out = at(op.out, token);
        if (op.positions) {
            const float* learned = op.positions + size_t(batch_->positions[token]) * size_t(size);
            for (int i = 0; i < size; i++) out[i] += learned[i];
        }
        if (op.types) {
            int type = batch_->token_types ? batch_->token_types[token] : 0;
            const float* of_type = op.types + size_t(type) * size_t(size);
            for (int i = 0; i < size; i++) out[i] += of_type[i];
        }
    }
}

void Executor::normalize(const Norm& norm, const float* x, int size, float* out) const {
    if (norm.kind == Norm::Kind::Rms)
        kernels_.rms_norm(x, norm.weight, norm.eps, size, out);
    else
        kernels_.layer_norm(x, norm.weight, norm.bias, norm.eps, size, out);
}

void Executor::norm(const Op& op, int begin, int end, float* row) {
    int size = width(op.source);
    for (int r = begin; r < end; r++) {
        float* out = at(op.out, r);
        normalize(op.norm, at(op.source, r), size, op.residual ? row : out);
        if (op.residual)
            for (int i = 0; i < size; i++) out[i] += row[i];
    }
}

void Executor::gather(const Op& op, int begin, int end) {
    int size = width(op.source), tokens = batch_->tokens;
    for (int i = begin; i < end; i++) {
        if (i < tokens) {
            finite_[i] &= kernels_.all_finite(at(op.source, i), size);
            continue;
        }
        const float* x = at(op.source, batch_->logit_tokens[i - tokens]);
        std::copy(x, x + size, at(op.out, i - tokens));
    }
}

// Row i of the result is the mean of the tokens after logit token i - 1, up to logit token i.
void Executor::mean(const Op& op, int begin, int end) {
    int size = width(op.source);
    for (int i = begin; i < end; i++) {
        int first = i > 0 ? batch_->logit_tokens[i - 1] + 1 : 0, last = batch_->logit_tokens[i];
        float* out = at(op.out, i);
        std::fill(out, out + size, 0.0f);
        for (int token = first; token <= last; token++) {
            const float* x = at(op.source, token);
            finite_[token] &= kernels_.all_finite(x, size);
            for (int column = 0; column < size; column++) out[column] += x[column];
        }
        float factor = 1.0f / float(last - first + 1);
        for (int column = 0; column < size; column++) out[column] *= factor;
    }
}

}  // namespace engine
