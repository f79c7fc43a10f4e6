#include "executor/executor.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "executor/numa.h"

namespace engine {
namespace {

// If a matmul has at most this many rows, each thread packs all activations for itself. This is faster than
// sharing the work and waiting at a barrier.
constexpr int kPrivateRows = 2;
constexpr int kFastRows = 16;  // in fast mode, matmuls with at least this many rows use per-channel weights
static_assert(kFastRows > kPrivateRows);

constexpr int kClaims = 4;  // min claims per thread and round, for load balance
constexpr int kTokenGrain = 4;
constexpr int kAttentionGrain = 1;

// Whether the matmul result is stored in a separate buffer first and combined with `out` afterwards.
bool is_apart(const Op& op) {
    return op.multiply || (op.residual && op.scale != 1);
}

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int share(int count, int thread, int threads) {
    return int(int64_t(count) * thread / threads);
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

// The AMX and per-channel kernels take two panels at a time. The AMX kernels overlap the epilogue with the next
// two, so larger claims are faster than many small ones.
int Executor::grain_of(const Op& op) const {
    const bool has_prefill = decode_rows(op) < rows_of(op);
    const bool takes_pairs = uses_per_channel(op) || (kernels_.has_bf16 && has_prefill);
    if (rows_of(op) < kFastRows || !takes_pairs) return op.grain;
    if (!kernels_.has_bf16) return round_up(op.grain, op.gated ? 1 : 2);
    int shared = uses_per_channel(op) ? op.units() / (pool_.size() * kClaims) : 1;
    return round_up(std::max(op.grain, shared), op.gated ? 1 : 2);
}

int Executor::rows_of(const Op& op) const {
    return op.over_logits ? batch_->logits : batch_->tokens;
}

int Executor::decode_rows(const Op& op) const {
    if (op.decode == op.prefill) return rows_of(op);
    if (fast_ && rows_of(op) >= kFastRows) return 0;
    return op.over_logits ? batch_->decode_logits : batch_->decode_tokens;
}

bool Executor::uses_per_channel(const Op& op) const {
    return fast_ && op.per_channel && rows_of(op) >= kFastRows;
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

void Executor::pack(const Op& op, const Segment& segment, int begin, int end, float* row) {
    int stride = width(op.source), columns = op.matrix->columns;
    const float* source = at(op.source, segment.first);
    auto pack = kernels_.pack[int(segment.numerics)];
    const Norm& norm = op.norm;
    if (norm.kind == Norm::Kind::None)
        return pack(source, stride, columns, segment.rows, begin, end, segment.input);
    for (int r = begin; r < end; r++) {
        normalize(norm, source + size_t(r) * size_t(stride), columns, row);
        // `row` holds only the normalized row r, so the stride is 0.
        pack(row, 0, columns, segment.rows, r, r + 1, segment.input);
    }
}

int Executor::slices_of(const Op& op) const {
    const int wanted = div_up(kClaims * pool_.size(), op.units());
    return std::clamp(std::min(wanted, rows_of(op) / kSliceRows), 1, kMaxSlices);
}

void Executor::slice(Segments& segments, int index, const Segment& whole) const {
    const int size =
        segments.slices == 1 ? whole.rows : round_up(div_up(whole.rows, segments.slices), kSliceRows);
    Segment part = whole;
    for (int i = 0; i < segments.slices; i++) {
        part.rows = std::min(size, whole.first + whole.rows - part.first);
        segments.items[i][index] = part;
        if (part.rows == 0) continue;
        part.first += part.rows;
        part.input +=
            round_up_size(kernels_.packed_bytes[int(part.numerics)](part.rows, part.matrix->columns), 64);
    }
}

Executor::Segments Executor::split(const Op& op, int thread) {
    const int total = rows_of(op);
    Segments segments;
    segments.slices = slices_of(op);
    segments.is_private = total <= kPrivateRows;
    Block& memory = segments.is_private ? private_input_[size_t(thread)] : shared_input_;
    if (uses_per_channel(op)) {
        slice(segments, 0, {Numerics::INT8_PER_CHANNEL, op.per_channel, 0, total, memory.data()});
        slice(segments, 1, {Numerics::INT8_PER_CHANNEL, op.per_channel, total, 0, memory.data()});
        return segments;
    }
    const int decode = decode_rows(op);
    uint8_t* half = memory.data() + memory.size() / 2 / 64 * 64;
    slice(segments, 0, {op.decode, op.matrix, 0, decode, memory.data()});
    slice(segments, 1, {op.prefill, op.matrix, decode, total - decode, half});
    return segments;
}

void Executor::linear(const Op& op, int thread, int& index) {
    const Segments segments = split(op, thread);
    float* row = rows_[size_t(thread)].floats();
    for (int i = 0; i < segments.slices; i++)
        for (const Segment& segment : segments.items[i]) {
            if (segment.rows == 0) continue;
            int begin = segments.is_private ? 0 : share(segment.rows, thread, pool_.size());
            int end = segments.is_private ? segment.rows : share(segment.rows, thread + 1, pool_.size());
            if (begin < end) pack(op, segment, begin, end, row);
        }
    if (is_adapted(op)) shrink(op, segments, thread);
    if (!segments.is_private) pool_.barrier(thread);
    round(thread, index, [&](int begin, int end) { multiply(op, segments, begin, end, thread); });
}

// Pieces of work are numbered slice by slice.
void Executor::multiply(const Op& op, const Segments& segments, int begin, int end, int thread) {
    const int units = op.units();
    const bool adapted = is_adapted(op);
    while (begin < end) {
        const int first = begin % units, last = std::min(first + end - begin, units);
        for (const Segment& segment : segments.items[begin / units]) {
            if (segment.rows == 0) continue;
            if (adapted)
                multiply_adapted(op, segment, first, last, thread);
            else
                multiply_units(op, segment, first, last, thread);
        }
        begin += last - first;
    }
}

void Executor::multiply_units(const Op& op, const Segment& segment, int begin, int end, int thread) {
    run_matmul(op, segment, begin, end, thread, nullptr, 0);
}

// `delta` is what adapters add, see Epilogue.
void Executor::run_matmul(const Op& op, const Segment& segment, int begin, int end, int thread,
                          const float* delta, int delta_stride) {
    const bool apart = is_apart(op);
    int stride = apart ? op.matrix->panels() * kPanelRows : width(op.out);
    float* base = apart ? matmul_out_.floats() : at(op.out, 0) + op.column;
    Epilogue epilogue{base + size_t(segment.first) * size_t(stride),
                      stride,
                      op.bias,
                      op.activation,
                      op.gated,
                      op.residual && !apart,
                      delta,
                      delta_stride};
    MatmulJob job{segment.matrix, segment.input, segment.rows, epilogue};
    kernels_.matmul[int(segment.numerics)](job, begin, end, scratch(thread));
    if (!apart && op.scale == 1 && op.softcap == 0) return;
    int from = begin * kPanelRows, to = std::min(end * kPanelRows, op.matrix->rows);
    for (int r = segment.first; r < segment.first + segment.rows; r++) {
        float* out = at(op.out, r) + op.column;
        const float* result = base + size_t(r) * size_t(stride);
        if (op.multiply)
            for (int i = from; i < to; i++) out[i] *= result[i];
        else if (apart)
            for (int i = from; i < to; i++) out[i] += op.scale * result[i];
        else
            for (int i = from; i < to; i++) out[i] *= op.scale;
        if (op.softcap > 0) kernels_.softcap(out + from, to - from, op.softcap);
    }
}

}  // namespace engine
