#include "executor/executor.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace engine {
namespace {

// Up to so many rows every thread packs the input for itself, which is quicker than waiting for others.
constexpr int kPrivateRows = 2;
constexpr int kFastRows = 16;  // from here on rounded weights are ahead
static_assert(kFastRows > kPrivateRows);

constexpr int kClaims = 4;  // of each thread at least
constexpr int kTokenGrain = 4;
constexpr int kAttentionGrain = 1;

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int share(int count, int thread, int threads) {
    return int(int64_t(count) * thread / threads);
}

}  // namespace

Executor::Executor(const Kernels& kernels, int threads, const std::vector<int>& cpus)
    : kernels_(kernels), pool_(threads, cpus), queues_{WorkQueue(threads), WorkQueue(threads)} {}

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

void Executor::set_cache(const KvCache& shape) {
    cache_ = shape;
    cache_memory_ = Block(cache_.bytes());
    cache_.data = cache_memory_.data();
}

void Executor::set_frequencies(std::vector<float> frequencies, float scale) {
    frequencies_ = std::move(frequencies);
    angle_scale_ = scale;
    angles_ = Block(size_t(arena_.max_tokens) * frequencies_.size() * 2 * sizeof(float));
}

void Executor::add_program(Program program) {
    programs_.push_back(std::move(program));
    reserve_scratch();
}

const Program& Executor::program(int tokens) const {
    for (const Program& program : programs_)
        if (program.capacity >= tokens) return program;
    return programs_.back();
}

void Executor::reserve_scratch() {
    size_t scratch = 64, input = 64, private_input = 64, row = 64, product = 0;
    for (const Step& step : programs_.back().steps) {
        if (step.kind == Step::Kind::Attention)
            scratch = std::max(scratch, kernels_.attend_scratch_bytes(step.shape));
        if (step.kind != Step::Kind::Linear) continue;
        int columns = step.matrix->columns;
        scratch = std::max(scratch, kernels_.scratch_bytes(columns));
        row = std::max(row, size_t(round_up(columns, kGroup)) * sizeof(float));
        if (step.multiply)
            product = std::max(product, size_t(step.matrix->panels() * kPanelRows) * sizeof(float));
        for (Numerics numerics : {step.generated, step.prompt}) {
            auto bytes = kernels_.packed_bytes[int(numerics)];
            input = std::max(input, 2 * round_up_size(bytes(arena_.max_tokens, columns), 64));
            private_input = std::max(private_input, 2 * round_up_size(bytes(kPrivateRows, columns), 64));
        }
        if (step.rounded)
            input =
                std::max(input, kernels_.packed_bytes[int(Numerics::INT8_ROWS)](arena_.max_tokens, columns));
    }
    product_ = Block(product * size_t(arena_.max_tokens));
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

void Executor::run(Batch& batch, std::vector<uint8_t>& finite) {
    const Program& program = this->program(batch.tokens);
    int window = 0;
    size_t part = 0;
    for (const Step& step : program.steps) {
        if (step.kind != Step::Kind::Attention) continue;
        window = step.shape.window;
        part = part_floats(step.shape);
        break;
    }
    schedule_.build(batch, cache_.block_size, window);
    size_t parts_bytes = size_t(schedule_.num_parts()) * part * sizeof(float);
    if (parts_bytes > parts_.size()) parts_ = Block(parts_bytes * 2);
    finite.assign(size_t(batch.tokens), 1);
    batch_ = &batch;
    finite_ = finite.data();
    plan_rounds(program);
    if (timing_) step_seconds_.assign(program.steps.size(), 0.0);
    pool_.run([this, &program](int thread) { work(program, thread); });
    const int stream = program.steps.back().source;
    for (int i = 0; i < batch.logits; i++)
        finite[size_t(batch.logit_tokens[i])] &= kernels_.all_finite(at(stream, i), width(stream));
    for (int token = 0; token < batch.tokens; token++)
        if (!finite[size_t(token)]) erase_kv(cache_, batch.write_slots[token]);
}

// Tiles take two panels at a time, and finish them beside the next two: a claim of a few is quicker than as
// many claims.
int Executor::grain_of(const Step& step) const {
    if (rows_of(step) < kFastRows || !kernels_.has_bf16) return step.grain;
    int shared = is_rounded(step) ? step.units() / (pool_.size() * kClaims) : 1;
    return round_up(std::max(step.grain, shared), step.gated ? 1 : 2);
}

int Executor::rows_of(const Step& step) const {
    return step.over_logits ? batch_->logits : batch_->tokens;
}

bool Executor::is_rounded(const Step& step) const {
    return fast_ && step.rounded && rows_of(step) >= kFastRows;
}

void Executor::plan_rounds(const Program& program) {
    rounds_.clear();
    const Batch& batch = *batch_;
    for (const Step& step : program.steps) {
        switch (step.kind) {
            case Step::Kind::Linear:
                rounds_.push_back({step.units(), grain_of(step)});
                break;
            case Step::Kind::Attention:
                rounds_.push_back({batch.num_items * step.shape.kv_heads, kAttentionGrain});
                if (batch.num_merges > 0) rounds_.push_back({batch.num_merges, kTokenGrain});
                break;
            case Step::Kind::Gather:
                rounds_.push_back({batch.tokens + batch.logits, kTokenGrain});
                break;
            default:
                rounds_.push_back({batch.tokens, kTokenGrain});
        }
    }
    rounds_.push_back({0, 1});
    queues_[0].reset(rounds_[0].count, rounds_[0].grain);
}

// One round: take pieces until there are none, then wait for the others. The next round's queue is made
// ready meanwhile; nobody can still be taking from it, for that was the round before this one.
template <class F>
void Executor::round(int thread, int& index, const F& piece) {
    if (thread == 0)
        queues_[(index + 1) % 2].reset(rounds_[size_t(index) + 1].count, rounds_[size_t(index) + 1].grain);
    WorkQueue& queue = queues_[index % 2];
    int begin, end;
    while (queue.take(thread, begin, end)) piece(begin, end);
    index++;
    pool_.barrier();
}

void Executor::work(const Program& program, int thread) {
    int index = 0;
    double started = timing_ ? now() : 0;
    for (size_t i = 0; i < program.steps.size(); i++) {
        const Step& step = program.steps[i];
        switch (step.kind) {
            case Step::Kind::Embed:
                round(thread, index, [&](int begin, int end) {
                    compute_angles(begin, end);
                    embed(step, begin, end);
                });
                break;
            case Step::Kind::Linear:
                linear(step, thread, index);
                break;
            case Step::Kind::RopeWrite:
                round(thread, index, [&](int begin, int end) { rope_write(step, begin, end); });
                break;
            case Step::Kind::Attention:
                attention(step, thread, index);
                break;
            case Step::Kind::Gather:
                round(thread, index, [&](int begin, int end) { gather(step, begin, end); });
                break;
        }
        if (timing_ && thread == 0) {
            double ended = now();
            step_seconds_[i] += ended - started;
            started = ended;
        }
    }
}

void Executor::compute_angles(int begin, int end) {
    int half = int(frequencies_.size());
    for (int token = begin; token < end; token++) {
        float* cosines = angles_.floats() + size_t(token) * size_t(2 * half);
        for (int i = 0; i < half; i++) {
            float angle = float(batch_->positions[token]) * frequencies_[size_t(i)];
            cosines[i] = float(std::cos(double(angle))) * angle_scale_;
            cosines[half + i] = float(std::sin(double(angle))) * angle_scale_;
        }
    }
}

void Executor::embed(const Step& step, int begin, int end) {
    int size = step.matrix->columns;
    for (int token = begin; token < end; token++) {
        float* out = at(step.out, token);
        kernels_.embed(*step.matrix, batch_->token_ids[token], out);
        if (!step.positions) continue;
        const float* learned = step.positions + size_t(batch_->positions[token]) * size_t(size);
        for (int i = 0; i < size; i++) out[i] += learned[i];
    }
}

void Executor::pack(const Step& step, const Part& part, int begin, int end, float* row) {
    int stride = width(step.source), columns = step.matrix->columns;
    const float* source = at(step.source, part.first);
    auto pack = kernels_.pack[int(part.numerics)];
    const Norm& norm = step.norm;
    if (norm.kind == Norm::Kind::None)
        return pack(source, stride, columns, part.rows, begin, end, part.input);
    for (int r = begin; r < end; r++) {
        const float* x = source + size_t(r) * size_t(stride);
        if (norm.kind == Norm::Kind::Rms)
            kernels_.rms_norm(x, norm.weight, norm.eps, columns, row);
        else
            kernels_.layer_norm(x, norm.weight, norm.bias, norm.eps, columns, row);
        // a stride of 0: every row of the source is this one
        pack(row, 0, columns, part.rows, r, r + 1, part.input);
    }
}

Executor::Parts Executor::split(const Step& step, int thread) {
    const int total = rows_of(step);
    bool is_private = total <= kPrivateRows;
    Block& memory = is_private ? private_input_[size_t(thread)] : shared_input_;
    if (is_rounded(step))
        return {{{Numerics::INT8_ROWS, step.rounded, 0, total, memory.data()}, {}}, total, is_private};
    int generated = step.over_logits ? batch_->generated_logits : batch_->generated;
    if (fast_ && total >= kFastRows) generated = 0;
    if (step.generated == step.prompt) generated = total;
    uint8_t* half = memory.data() + memory.size() / 2 / 64 * 64;
    return {{{step.generated, step.matrix, 0, generated, memory.data()},
             {step.prompt, step.matrix, generated, total - generated, half}},
            total,
            is_private};
}

void Executor::linear(const Step& step, int thread, int& index) {
    const Parts parts = split(step, thread);
    float* row = rows_[size_t(thread)].floats();
    for (const Part& part : parts.parts) {
        if (part.rows == 0) continue;
        int begin = parts.is_private ? 0 : share(part.rows, thread, pool_.size());
        int end = parts.is_private ? part.rows : share(part.rows, thread + 1, pool_.size());
        if (begin < end) pack(step, part, begin, end, row);
    }
    if (!parts.is_private) pool_.barrier();
    round(thread, index, [&](int begin, int end) { multiply(step, parts, begin, end, scratch(thread)); });
}

void Executor::multiply(const Step& step, const Parts& parts, int begin, int end, uint8_t* scratch) {
    int stride = step.multiply ? step.matrix->panels() * kPanelRows : width(step.out);
    float* base = step.multiply ? product_.floats() : at(step.out, 0) + step.column;
    for (const Part& part : parts.parts) {
        if (part.rows == 0) continue;
        Epilogue epilogue{base + size_t(part.first) * size_t(stride),
                          stride,
                          step.bias,
                          step.activation,
                          step.gated,
                          step.residual};
        MatmulJob job{part.matrix, part.input, part.rows, epilogue};
        kernels_.matmul[int(part.numerics)](job, begin, end, scratch);
    }
    if (!step.multiply) return;
    int from = begin * kPanelRows, to = std::min(end * kPanelRows, step.matrix->rows);
    for (int r = 0; r < parts.rows; r++) {
        float* out = at(step.out, r) + step.column;
        for (int i = from; i < to; i++) out[i] *= base[size_t(r) * size_t(stride) + size_t(i)];
    }
}

void Executor::rope_write(const Step& step, int begin, int end) {
    const AttentionShape& shape = step.shape;
    int half = int(frequencies_.size());
    for (int token = begin; token < end; token++) {
        float* queries = at(step.source, token);
        float* keys = queries + shape.heads * shape.head_dim;
        float* values = keys + shape.kv_heads * shape.head_dim;
        for (int head = 0; step.query_norm && head < shape.heads; head++) {
            float* x = queries + head * shape.head_dim;
            kernels_.rms_norm(x, step.query_norm, step.eps, shape.head_dim, x);
        }
        for (int head = 0; step.key_norm && head < shape.kv_heads; head++) {
            float* x = keys + head * shape.head_dim;
            kernels_.rms_norm(x, step.key_norm, step.eps, shape.head_dim, x);
        }
        if (step.rope_dim > 0) {
            const float* cosines = angles_.floats() + size_t(token) * size_t(2 * half);
            // Keys follow the queries, so one call turns both.
            kernels_.rotate(queries, shape.heads + shape.kv_heads, shape.head_dim, step.rope_dim, cosines,
                            cosines + half);
        }
        kernels_.write_kv(cache_, step.layer, batch_->write_slots[token], keys, values);
    }
}

void Executor::attention(const Step& step, int thread, int& index) {
    AttentionJob job{&step.shape,        &cache_,         batch_,          step.layer,     at(step.source, 0),
                     width(step.source), at(step.out, 0), width(step.out), parts_.floats()};
    int kv_heads = step.shape.kv_heads;
    round(thread, index, [&](int begin, int end) {
        for (int i = begin; i < end; i++) kernels_.attend(job, i / kv_heads, i % kv_heads, scratch(thread));
    });
    if (batch_->num_merges == 0) return;
    round(thread, index, [&](int begin, int end) {
        for (int i = begin; i < end; i++) kernels_.merge(job, i);
    });
}

void Executor::gather(const Step& step, int begin, int end) {
    int size = width(step.source), tokens = batch_->tokens;
    for (int i = begin; i < end; i++) {
        if (i < tokens) {
            finite_[i] &= kernels_.all_finite(at(step.source, i), size);
            continue;
        }
        const float* x = at(step.source, batch_->logit_tokens[i - tokens]);
        std::copy(x, x + size, at(step.out, i - tokens));
    }
}

}  // namespace engine
