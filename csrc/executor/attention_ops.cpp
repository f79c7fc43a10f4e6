// The executor's ops for attention: RoPE, cache writes, and attention itself. Also its copies of cache blocks.
#include <algorithm>
#include <cmath>

#include "executor/executor.h"

namespace engine {

void Executor::plan_attention(const Program& program, const Batch& batch) {
    for (Windowed& each : windows_) {
        each.batch = batch;
        if (each.window > 0 && has_window_cache()) use_window_cache(each);
        each.schedule.build(each.batch, caches_[0].block_size, each.window, each.centered);
    }
    size_t parts_bytes = 0;
    for (const Op& op : program.ops) {
        if (op.kind != Op::Kind::Attention) continue;
        int parts = windows_[size_t(op.schedule)].schedule.num_parts();
        parts_bytes = std::max(parts_bytes, size_t(parts) * part_floats(op.shape) * sizeof(float));
    }
    if (parts_bytes > parts_.size()) parts_ = Block(parts_bytes * 2);
}

// Sequences of a prefix group share their first blocks in cache 0. In cache 1, some of them may have other
// blocks at these places, or none. So a group shares only the leading blocks that are the same for all.
void Executor::use_window_cache(Windowed& windowed) const {
    Batch& batch = windowed.batch;
    batch.tables = batch.window_tables;
    if (!batch.prefix_groups) return;
    std::vector<int32_t>& shared = windowed.prefix_blocks;
    std::vector<int> first_row;  // of each group
    shared.clear();
    for (int row = 0; row < batch.rows; row++) {
        int group = batch.prefix_groups[row];
        if (group < 0) continue;
        if (size_t(group) >= shared.size()) {
            shared.resize(size_t(group) + 1, -1);
            first_row.resize(size_t(group) + 1, 0);
        }
        int32_t& count = shared[size_t(group)];
        if (count < 0) {
            count = batch.prefix_blocks[group];
            first_row[size_t(group)] = row;
            continue;
        }
        const int32_t *table = batch.table(row), *first = batch.table(first_row[size_t(group)]);
        count = int32_t(std::mismatch(table, table + count, first).first - table);
    }
    batch.prefix_blocks = shared.data();
}

void Executor::compute_angles(int begin, int end) {
    for (int token = begin; token < end; token++)
        for (const Rope& rope : ropes_) {
            int half = int(rope.frequencies.size());
            float* cosines = angles_.floats() + size_t(token) * size_t(angles_per_token_) + rope.start;
            for (int i = 0; i < half; i++) {
                float angle = float(batch_->positions[token]) * rope.frequencies[size_t(i)];
                cosines[i] = float(std::cos(double(angle))) * rope.scale;
                cosines[half + i] = float(std::sin(double(angle))) * rope.scale;
            }
        }
}

void Executor::norm_heads(const Op& op, float* x, int heads, const float* weight) const {
    if (!weight) return;
    int size = op.shape.head_dim, total = heads * size;
    if (op.whole_norm) size = total;
    for (int i = 0; i < total; i += size) kernels_.rms_norm(x + i, weight, op.eps, size, x + i);
}

// The cosines of a token, which its sines follow.
const float* Executor::angles_of(const Op& op, int token) const {
    return angles_.floats() + size_t(token) * size_t(angles_per_token_) + ropes_[size_t(op.rope)].start;
}

void Executor::rope_write(const Op& op, int begin, int end) {
    const AttentionShape& shape = op.shape;
    for (int token = begin; token < end; token++) {
        float* queries = at(op.source, token);
        float* keys = queries + shape.heads * shape.head_dim;
        float* values = keys + shape.kv_heads * shape.head_dim;
        norm_heads(op, queries, shape.heads, op.query_norm);
        norm_heads(op, keys, shape.kv_heads, op.key_norm);
        if (op.rope_dim > 0) {
            const float* cosines = angles_of(op, token);
            // The keys follow the queries in memory, so one call rotates both.
            kernels_.rope(queries, shape.heads + shape.kv_heads, shape.head_dim, op.rope_dim, cosines,
                          cosines + op.rope_dim / 2);
        }
        const int64_t* slots = op.cache == 0 ? batch_->write_slots : batch_->window_slots;
        kernels_.write_kv(caches_[op.cache], op.layer, slots[token], keys, values);
    }
}

void Executor::latent_write(const Op& op, int begin, int end) {
    int rank = width(op.source) - op.rope_dim;
    for (int token = begin; token < end; token++) {
        float* x = at(op.source, token);
        const float* cosines = angles_of(op, token);
        kernels_.rms_norm(x, op.key_norm, op.eps, rank, x);
        kernels_.rope(x + rank, 1, op.rope_dim, op.rope_dim, cosines, cosines + op.rope_dim / 2);
        kernels_.write_kv(caches_[0], op.layer, batch_->write_slots[token], x, nullptr);
    }
}

// A piece of HeadLinear is one head of up to kHeadRows rows.
int Executor::head_pieces(const Op& op) const {
    return op.num_experts * div_up(rows_of(op), kHeadRows);
}

void Executor::head_linear(const Op& op, int piece, int thread) {
    const int head = piece % op.num_experts, total = rows_of(op);
    const int begin = piece / op.num_experts * kHeadRows, end = std::min(begin + kHeadRows, total);
    const Matrix matrix = op.by_head.matrix(head);
    const int from_size = matrix.columns + op.rope_dim, to_size = matrix.rows + op.rope_dim;
    const int decode = op.over_logits ? batch_->decode_logits : batch_->decode_tokens;
    uint8_t* input = private_input_[size_t(thread)].data();
    for (bool is_prefill : {false, true}) {
        const int first = is_prefill ? std::max(begin, decode) : begin;
        const int last = is_prefill ? end : std::min(end, decode), rows = last - first;
        if (rows <= 0) continue;
        const int numerics = int(op.by_head.numerics(is_prefill));
        const float* x = at(op.source, first) + head * from_size;
        kernels_.pack[numerics](x, width(op.source), matrix.columns, rows, 0, rows, input);
        Epilogue epilogue{
            at(op.out, first) + head * to_size, width(op.out), nullptr, Activation::None, false, false};
        kernels_.matmul[numerics]({&matrix, input, rows, epilogue}, 0, matrix.panels(), scratch(thread));
    }
    for (int row = begin; op.rope_dim > 0 && row < end; row++) {
        const float* from = at(op.source, row) + head * from_size + matrix.columns;
        float* to = at(op.out, row) + head * to_size + matrix.rows;
        const float* cosines = angles_of(op, row);
        std::copy(from, from + op.rope_dim, to);
        kernels_.rope(to, 1, op.rope_dim, op.rope_dim, cosines, cosines + op.rope_dim / 2);
    }
}

void Executor::attention(const Op& op, int thread, int& index) {
    const Batch& batch = windows_[size_t(op.schedule)].batch;
    AttentionJob job{&op.shape,        &caches_[op.cache], &batch,        op.layer,       at(op.source, 0),
                     width(op.source), at(op.out, 0),      width(op.out), parts_.floats()};
    int kv_heads = op.shape.kv_heads;
    round(thread, index, [&](int begin, int end) {
        for (int i = begin; i < end; i++) kernels_.attend(job, i / kv_heads, i % kv_heads, scratch(thread));
    });
    if (batch.num_merges == 0) return;
    round(thread, index, [&](int begin, int end) {
        for (int i = begin; i < end; i++) kernels_.merge(job, i);
    });
}

size_t Executor::bytes_per_block(int group) const {
    if (group == 2) return states_.floats * sizeof(float);
    return caches_[group].block_bytes() * size_t(caches_[group].layers);
}

void Executor::read_block(int group, int64_t block, uint8_t* out) const {
    if (group == 2) {
        memcpy(out, state(int(block)), bytes_per_block(group));
        return;
    }
    const KvCache& cache = caches_[group];
    size_t size = cache.block_bytes();
    for (int layer = 0; layer < cache.layers; layer++)
        memcpy(out + size_t(layer) * size, cache.key_tile(layer, block, 0, 0), size);
}

void Executor::write_block(int group, int64_t block, const uint8_t* in) {
    if (group == 2) {
        memcpy(state(int(block)), in, bytes_per_block(group));
        return;
    }
    const KvCache& cache = caches_[group];
    size_t size = cache.block_bytes();
    for (int layer = 0; layer < cache.layers; layer++)
        memcpy(cache.key_tile(layer, block, 0, 0), in + size_t(layer) * size, size);
}

}  // namespace engine
