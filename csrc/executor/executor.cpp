#include "executor/executor.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "executor/numa.h"

namespace engine {
namespace {

constexpr int kTokenGrain = 4;
constexpr int kAttentionGrain = 1;

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Executor::Executor(const Kernels& kernels, int threads, const Placement& placement)
    : kernels_(kernels),
      pool_(threads, placement),
      queues_{WorkQueue(threads, placement.nodes), WorkQueue(threads, placement.nodes)} {}

void Executor::set_arena(ArenaShape shape) {
    arena_ = std::move(shape);
    std::vector<size_t> starts;
    size_t total = 0;
    for (const ArenaShape::Place& place : arena_.places) {
        int rows = place.over_logits ? arena_.max_logits : arena_.max_tokens;
        starts.push_back(total);
        total += round_up_size(size_t(place.width) * size_t(rows), 1024);
    }
    arena_memory_ = Block(total * sizeof(float));
    buffers_.clear();
    for (const ArenaShape::Buffer& buffer : arena_.buffers)
        buffers_.push_back(arena_memory_.floats() + starts[size_t(buffer.place)]);
}

void Executor::set_cache(int index, const KvCache& shape) {
    caches_[index] = shape;
    cache_memory_[index] = Block(shape.bytes());
    interleave(cache_memory_[index], pool_.nodes());
    caches_[index].data = cache_memory_[index].data();
}

void Executor::add_rope(std::vector<float> frequencies, float scale) {
    ropes_.push_back({std::move(frequencies), scale, angles_per_token_});
    angles_per_token_ += 2 * int(ropes_.back().frequencies.size());
    angles_ = Block(size_t(arena_.max_tokens) * size_t(angles_per_token_) * sizeof(float));
}

void Executor::add_program(Program program) {
    for (Op& op : program.ops) {
        if (op.kind != Op::Kind::Attention) continue;
        auto same = [&](const Windowed& each) {
            return each.window == op.shape.window && each.centered == op.shape.centered;
        };
        auto found = std::find_if(windows_.begin(), windows_.end(), same);
        op.schedule = int(found - windows_.begin());
        if (found == windows_.end()) windows_.push_back({op.shape.window, op.shape.centered, {}, {}, {}});
    }
    programs_.push_back(std::move(program));
    reserve_scratch();
}

const Program& Executor::program(int tokens) const {
    for (const Program& program : programs_)
        if (program.capacity >= tokens) return program;
    return programs_.back();
}

void Executor::reserve_scratch() {
    size_t scratch = 64, input = 64, private_input = 64, row = 64, matmul_out = 0;
    for (const Op& op : programs_.back().ops) {
        if (op.kind == Op::Kind::Attention)
            scratch = std::max(scratch, kernels_.attend_scratch_bytes(op.shape));
        if (op.kind == Op::Kind::Norm) row = std::max(row, size_t(width(op.source)) * sizeof(float));
        if (op.kind == Op::Kind::Route) row = std::max(row, 2 * size_t(width(op.source)) * sizeof(float));
        if (op.kind == Op::Kind::Recurrent)
            row = std::max(row, 2 * size_t(op.recurrence.state_size) * sizeof(float));
        if (op.kind == Op::Kind::Experts)
            for (const ExpertMatrices* matrices : {&op.up, &op.down})
                scratch = std::max(scratch, kernels_.scratch_bytes(matrices->first.columns));
        if (op.kind == Op::Kind::HeadLinear) {
            int columns = op.by_head.first.columns;
            scratch = std::max(scratch, kernels_.scratch_bytes(columns));
            for (Numerics numerics : {op.by_head.decode, op.by_head.prefill})
                private_input =
                    std::max(private_input, kernels_.packed_bytes[int(numerics)](kHeadRows, columns));
        }
        if (op.kind != Op::Kind::Linear) continue;
        int columns = op.matrix->columns;
        scratch = std::max(scratch, kernels_.scratch_bytes(columns));
        row = std::max(row, size_t(round_up(columns, kGroup)) * sizeof(float));
        if (is_apart(op))
            matmul_out = std::max(matmul_out, size_t(op.matrix->panels() * kPanelRows) * sizeof(float));
        for (Numerics numerics : {op.decode, op.prefill}) {
            auto bytes = kernels_.packed_bytes[int(numerics)];
            input =
                std::max(input, 2 * round_up_size(bytes(arena_.max_tokens, columns) + kMaxSlices * 64, 64));
            private_input = std::max(private_input, 2 * round_up_size(bytes(kPrivateRows, columns), 64));
        }
        if (op.per_channel)
            input = std::max(
                input, kernels_.packed_bytes[int(Numerics::INT8_PER_CHANNEL)](arena_.max_tokens, columns) +
                           kMaxSlices * 64);
    }
    matmul_out_ = Block(matmul_out * size_t(arena_.max_tokens));
    shared_input_ = Block(input);
    scratch_.clear();
    private_input_.clear();
    rows_.clear();
    for (int thread = 0; thread < pool_.size(); thread++) {
        scratch_.emplace_back(scratch);
        private_input_.emplace_back(private_input);
        rows_.emplace_back(row);
    }
}

void Executor::run(const Batch& batch, std::vector<uint8_t>& finite) {
    const Program& plain = this->program(batch.tokens);
    const Program& program = taps_.count ? with_taps(plain) : plain;
    plan_attention(program, batch);
    finite.assign(size_t(batch.tokens), 1);
    batch_ = &batch;
    finite_ = finite.data();
    plan_rounds(program);
    if (timing_) op_seconds_.assign(program.ops.size(), 0.0);
    pool_.run([this, &program](int thread) { work(program, thread); });
    const int stream = plain.ops.back().source;
    const bool is_checked = plain.ops.back().kind == Op::Kind::Mean;
    for (int i = 0; i < batch.logits && !is_checked; i++)
        finite[size_t(batch.logit_tokens[i])] &= kernels_.all_finite(at(stream, i), width(stream));
    for (int token = 0; token < batch.tokens; token++) {
        if (finite[size_t(token)]) continue;
        erase_kv(caches_[0], batch.write_slots[token]);
        if (has_window_cache()) erase_kv(caches_[1], batch.window_slots[token]);
    }
}

int Executor::rows_of(const Op& op) const {
    return op.over_logits ? batch_->logits : batch_->tokens;
}

void Executor::plan_rounds(const Program& program) {
    rounds_.clear();
    const Batch& batch = *batch_;
    for (const Op& op : program.ops) {
        switch (op.kind) {
            case Op::Kind::Linear:
                rounds_.push_back({op.units() * slices_of(op), grain_of(op)});
                break;
            case Op::Kind::Attention: {
                const Batch& windowed = windows_[size_t(op.schedule)].batch;
                rounds_.push_back({windowed.num_items * op.shape.kv_heads, kAttentionGrain});
                if (windowed.num_merges > 0) rounds_.push_back({windowed.num_merges, kTokenGrain});
                break;
            }
            case Op::Kind::Norm:
            case Op::Kind::Route:
            case Op::Kind::GateRows:
                rounds_.push_back({rows_of(op), kTokenGrain});
                break;
            case Op::Kind::Experts: {
                // Sort, pack, up, pack, down, combine. The counts of up and down are known after sorting.
                int rows = rows_of(op), packed = rows * op.routing.per_token;
                for (int count : {1, packed, 0, packed, 0, rows}) rounds_.push_back({count, 1});
                break;
            }
            case Op::Kind::Recurrent:
                plan_recurrent(op);
                break;
            case Op::Kind::HeadLinear:
                rounds_.push_back({head_pieces(op), 1});
                break;
            case Op::Kind::Gather:
                rounds_.push_back({batch.tokens + batch.logits, kTokenGrain});
                break;
            case Op::Kind::Mean:
                rounds_.push_back({batch.logits, 1});
                break;
            case Op::Kind::Tap:
                rounds_.push_back({op.num_experts, 1});
                break;
            case Op::Kind::AddRows:
                rounds_.push_back({rows_of(op), kTokenGrain});
                break;
            default:
                rounds_.push_back({batch.tokens, kTokenGrain});
        }
    }
    rounds_.push_back({0, 1});
    queues_[0].reset(rounds_[0].count, rounds_[0].grain);
}

void Executor::work(const Program& program, int thread) {
    int index = 0;
    double started = timing_ ? now() : 0;
    for (size_t i = 0; i < program.ops.size(); i++) {
        const Op& op = program.ops[i];
        switch (op.kind) {
            case Op::Kind::Embed:
                round(thread, index, [&](int begin, int end) {
                    compute_angles(begin, end);
                    embed(op, begin, end);
                });
                break;
            case Op::Kind::Linear:
                linear(op, thread, index);
                break;
            case Op::Kind::RopeWrite:
                round(thread, index, [&](int begin, int end) { rope_write(op, begin, end); });
                break;
            case Op::Kind::LatentWrite:
                round(thread, index, [&](int begin, int end) { latent_write(op, begin, end); });
                break;
            case Op::Kind::HeadLinear:
                round(thread, index, [&](int begin, int end) {
                    for (int piece = begin; piece < end; piece++) head_linear(op, piece, thread);
                });
                break;
            case Op::Kind::Attention:
                attention(op, thread, index);
                break;
            case Op::Kind::Norm:
                round(thread, index,
                      [&](int begin, int end) { norm(op, begin, end, rows_[size_t(thread)].floats()); });
                break;
            case Op::Kind::Route:
                round(thread, index, [&](int begin, int end) {
                    route_rows(op, begin, end, rows_[size_t(thread)].floats());
                });
                break;
            case Op::Kind::GateRows:
                round(thread, index, [&](int begin, int end) { gate_rows(op, begin, end); });
                break;
            case Op::Kind::Experts:
                experts(op, thread, index);
                break;
            case Op::Kind::Recurrent:
                recurrent(op, thread, index);
                break;
            case Op::Kind::Gather:
                round(thread, index, [&](int begin, int end) { gather(op, begin, end); });
                break;
            case Op::Kind::Mean:
                round(thread, index, [&](int begin, int end) { mean(op, begin, end); });
                break;
            case Op::Kind::Tap:
                round(thread, index, [&](int begin, int end) { tap(op, begin, end); });
                break;
            case Op::Kind::AddRows:
                round(thread, index, [&](int begin, int end) { add_rows(op, begin, end); });
                break;
            case Op::Kind::AddPositions:
                round(thread, index, [&](int begin, int end) { add_positions(op, begin, end); });
                break;
        }
        if (timing_ && thread == 0) {
            double ended = now();
            op_seconds_[i] += ended - started;
            started = ended;
        }
    }
}

}  // namespace engine
