// The part of matmuls and of the embedding that LoRA adapters add (adapters.h).
#include <algorithm>

#include "executor/executor.h"

namespace engine {
namespace {

constexpr int kChunkRows = 16;         // rows whose A x is computed at a time
constexpr int kDeltaFloats = 1 << 13;  // values of B (A x) that a thread computes at a time, for its cache
constexpr int kPrivateShrunkRows = 2;  // as kPrivateRows of executor.h

}  // namespace

void Executor::set_adapter(int index, LoadedAdapter adapter) {
    if (adapters.loaded.size() <= size_t(index)) adapters.loaded.resize(size_t(index) + 1);
    adapters.loaded[size_t(index)] = std::move(adapter);
    const int before = adapters.row_floats();
    for (const AdapterMatrices& matrices : adapters.loaded[size_t(index)].sites) {
        adapters.max_rank = std::max(adapters.max_rank, round_up(matrices.a.rows, kPanelRows));
        adapters.max_groups = std::max(adapters.max_groups, matrices.num_groups());
    }
    if (adapters.row_floats() > before || deltas_.empty()) reserve_adapters();
}

void Executor::reserve_adapters() {
    size_t input = 64;
    const size_t hidden = sizeof(float) * size_t(adapters.row_floats());
    for (const Numerics numerics : {Numerics::F32, Numerics::INT8})
        for (const Op& op : programs_.back().ops)
            if (op.kind == Op::Kind::Linear)
                input = std::max(input, kernels_.packed_bytes[int(numerics)](kChunkRows, op.matrix->columns));
    shrunk_ = Block(hidden * size_t(arena_.max_tokens));
    private_shrunk_.clear();
    adapter_input_.clear();
    deltas_.clear();
    for (int thread = 0; thread < pool_.size(); thread++) {
        private_shrunk_.emplace_back(hidden * kPrivateShrunkRows);
        adapter_input_.emplace_back(input);
        deltas_.emplace_back(sizeof(float) *
                             size_t(std::max(kDeltaFloats, 2 * kPanelRows * arena_.max_tokens)));
    }
}

bool Executor::is_adapted(const Op& op) const {
    if (op.site < 0) return false;
    const AdapterRun* runs = op.over_logits ? batch_->logit_runs : batch_->runs;
    const int count = op.over_logits ? batch_->num_logit_runs : batch_->num_runs;
    return std::any_of(runs, runs + count, [&](const AdapterRun& run) {
        return !adapters.matrices(run.adapter, op.site).is_empty();
    });
}

template <class F>
void Executor::for_runs(const Op& op, const Segment& segment, const F& visit) const {
    const AdapterRun* runs = op.over_logits ? batch_->logit_runs : batch_->runs;
    const int count = op.over_logits ? batch_->num_logit_runs : batch_->num_runs;
    const int end = segment.first + segment.rows;
    for (int i = 0; i < count; i++) {
        const int first = std::max(runs[i].first, segment.first);
        const int last = std::min(runs[i].first + runs[i].rows, end);
        const AdapterMatrices& matrices = adapters.matrices(runs[i].adapter, op.site);
        if (first < last && !matrices.is_empty())
            visit(AdapterRun{first, last - first, runs[i].adapter}, matrices);
    }
}

float* Executor::shrunk(const Op& op, int row, int thread) const {
    const bool is_private = rows_of(op) <= kPrivateShrunkRows;
    const Block& memory = is_private ? private_shrunk_[size_t(thread)] : shrunk_;
    return memory.floats() + size_t(adapters.row_floats()) * size_t(row);
}

// A thread computes the rows that it has packed itself, so no thread waits for another.
void Executor::shrink(const Op& op, const Segments& segments, int thread) {
    const int threads = segments.is_private ? 1 : pool_.size(), own = segments.is_private ? 0 : thread;
    for (int i = 0; i < segments.slices; i++)
        for (const Segment& segment : segments.items[i]) {
            const int from = segment.first + int(int64_t(segment.rows) * own / threads);
            const int to = segment.first + int(int64_t(segment.rows) * (own + 1) / threads);
            const size_t row_bytes = kernels_.packed_bytes[int(segment.numerics)](1, op.matrix->columns);
            // Whether the packed rows of the matmul follow each other, so that A can read some of them.
            const bool is_linear = !kernels_.interleaves_rows &&
                                   kernels_.packed_bytes[int(segment.numerics)](
                                       segment.rows, op.matrix->columns) == row_bytes * size_t(segment.rows);
            for_runs(op, segment, [&](const AdapterRun& run, const AdapterMatrices& matrices) {
                const int begin = std::clamp(from - run.first, 0, run.rows);
                const int end = std::clamp(to - run.first, 0, run.rows);
                if (begin >= end || !matrices.has_ranks()) return;
                float* out = shrunk(op, run.first + begin, thread);
                if (!is_linear || segment.numerics != matrices.numerics)
                    return shrink_rows(op, matrices, run.first + begin, end - begin, thread, out);
                const uint8_t* input = segment.input + size_t(run.first + begin - segment.first) * row_bytes;
                multiply_a(matrices, input, end - begin, thread, out);
            });
        }
}

// Computes A x of some rows from packed activations, and quantizes it if B has bytes.
void Executor::multiply_a(const AdapterMatrices& matrices, const uint8_t* input, int rows, int thread,
                          float* out) {
    const Epilogue epilogue{out, adapters.row_floats(), nullptr, Activation::None, false, false};
    kernels_.matmul[int(matrices.numerics)]({&matrices.a, input, rows, epilogue}, 0, matrices.a.panels(),
                                            scratch(thread));
    for (int row = 0; row < rows && matrices.bytes; row++, out += adapters.row_floats())
        kernels_.pack_hidden(matrices.parts.data(), int(matrices.parts.size()), out, out + adapters.max_rank);
}

// As multiply_a for rows [first, first + count) of the op, but packs the activations for A first.
void Executor::shrink_rows(const Op& op, const AdapterMatrices& matrices, int first, int count, int thread,
                           float* out) {
    for (int done = 0; done < count; done += kChunkRows) {
        const int rows = std::min(kChunkRows, count - done);
        const Segment chunk{matrices.numerics, &matrices.a, first + done, rows,
                            adapter_input_[size_t(thread)].data()};
        pack(op, chunk, 0, rows, rows_[size_t(thread)].floats());
        multiply_a(matrices, chunk.input, rows, thread, out + size_t(done) * size_t(adapters.row_floats()));
    }
}

void Executor::multiply_adapted(const Op& op, const Segment& segment, int begin, int end, int thread) {
    const int panels = op.gated ? 2 : 1, unit_floats = panels * kPanelRows;
    const int units = std::max(1, kDeltaFloats / (segment.rows * unit_floats));
    float* delta = deltas_[size_t(thread)].floats();
    int covered = 0;
    for_runs(op, segment, [&](const AdapterRun& run, const AdapterMatrices& matrices) {
        covered += matrices.has_ranks() ? run.rows : 0;
    });
    for (int unit = begin; unit < end; unit += units) {
        const int last = std::min(unit + units, end), stride = (last - unit) * unit_floats;
        // Adding -0 changes no bit of the rows without an adapter.
        if (covered < segment.rows) std::fill_n(delta, size_t(segment.rows) * size_t(stride), -0.0f);
        for_runs(op, segment, [&](const AdapterRun& run, const AdapterMatrices& matrices) {
            if (!matrices.has_ranks()) return;
            float* out =
                delta + ptrdiff_t(run.first - segment.first) * stride - ptrdiff_t(unit) * unit_floats;
            const float* hidden = shrunk(op, run.first, thread) + (matrices.bytes ? adapters.max_rank : 0);
            const ExpandJob job{matrices.panels,
                                matrices.floats,
                                matrices.bytes,
                                hidden,
                                adapters.row_floats(),
                                run.rows,
                                out,
                                stride};
            kernels_.expand(job, unit * panels, last * panels);
        });
        run_matmul(op, segment, unit, last, thread, delta - ptrdiff_t(unit) * unit_floats, stride);
        for_runs(op, segment, [&](const AdapterRun& run, const AdapterMatrices& matrices) {
            if (matrices.whole.rows > 0) replace_rows(op, run, matrices, unit, last, thread);
        });
    }
}

// Computes units of some rows again, with the matrix that takes the place of the weights.
void Executor::replace_rows(const Op& op, const AdapterRun& run, const AdapterMatrices& matrices, int begin,
                            int end, int thread) {
    for (int done = 0; done < run.rows; done += kChunkRows) {
        const Segment chunk{matrices.numerics, &matrices.whole, run.first + done,
                            std::min(kChunkRows, run.rows - done), adapter_input_[size_t(thread)].data()};
        pack(op, chunk, 0, chunk.rows, rows_[size_t(thread)].floats());
        run_matmul(op, chunk, begin, end, thread, nullptr, 0);
    }
}

void Executor::add_to_embedding(int token, int size, float* out) const {
    const AdapterRun* end = batch_->runs + batch_->num_runs;
    const AdapterRun* run = std::find_if(
        batch_->runs, end, [token](const AdapterRun& each) { return token < each.first + each.rows; });
    if (run == end || token < run->first) return;
    const AdapterEmbedding& change = adapters.loaded[size_t(run->adapter)].embedding;
    if (change.table)
        memcpy(out, change.table + size_t(batch_->token_ids[token]) * size_t(size), 4 * size_t(size));
    const float* factors = change.a + size_t(batch_->token_ids[token]) * size_t(change.rank);
    for (int k = 0; k < change.rank; k++)
        for (int i = 0; i < size; i++) out[i] += factors[k] * change.b[size_t(k) * size_t(size) + size_t(i)];
}

}  // namespace engine
