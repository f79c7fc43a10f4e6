// Matmuls of linear layers: how their rows are divided by arithmetic, packed and multiplied.
#include <algorithm>

#include "executor/executor.h"

namespace engine {
namespace {

constexpr int kFastRows = 16;  // in fast mode, matmuls with at least this many rows use per-channel weights
static_assert(kFastRows > kPrivateRows);
constexpr int kClaims = 4;  // min claims per thread and round, for load balance

int share(int count, int thread, int threads) {
    return int(int64_t(count) * thread / threads);
}

}  // namespace

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

int Executor::decode_rows(const Op& op) const {
    if (op.decode == op.prefill) return rows_of(op);
    if (fast_ && rows_of(op) >= kFastRows) return 0;
    return op.over_logits ? batch_->decode_logits : batch_->decode_tokens;
}

bool Executor::uses_per_channel(const Op& op) const {
    return fast_ && op.per_channel && rows_of(op) >= kFastRows;
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
