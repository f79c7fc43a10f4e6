// The part of matmuls and of the embedding that LoRA adapters add (adapters.h).
#include <algorithm>

#include "executor/executor.h"

namespace engine {
namespace {

constexpr int kChunkRows = 16;         // rows whose A x is computed at a time
constexpr int kDeltaFloats = 1 << 15;  // values of B (A x) that a thread computes at a time, for its L2 cache
constexpr int kPrivateShrunkRows = 2;  // as kPrivateRows of executor.cpp

}  // namespace

void Executor::set_adapter(int index, LoadedAdapter adapter) {
    if (adapters.loaded.size() <= size_t(index)) adapters.loaded.resize(size_t(index) + 1);
    adapters.loaded[size_t(index)] = std::move(adapter);
    int widest = 0;
    for (const LoadedAdapter& each : adapters.loaded)
        for (const AdapterMatrices& matrices : each.sites) widest = std::max(widest, matrices.b.columns);
    if (widest <= adapters.max_rank) return;
    adapters.max_rank = widest;
    reserve_adapters();
}

void Executor::reserve_adapters() {
    size_t input = 64, hidden = 64, scratch = 64;
    for (const Numerics numerics : {Numerics::F32, Numerics::INT8}) {
        auto bytes = kernels_.packed_bytes[int(numerics)];
        hidden = std::max(hidden, round_up_size(bytes(1, adapters.max_rank), 64));
        for (const Op& op : programs_.back().ops)
            if (op.kind == Op::Kind::Linear) input = std::max(input, bytes(kChunkRows, op.matrix->columns));
    }
    scratch = std::max(scratch, kernels_.scratch_bytes(adapters.max_rank));
    shrunk_ = Block(hidden * size_t(arena_.max_tokens));
    private_shrunk_.clear();
    adapter_input_.clear();
    ranks_.clear();
    deltas_.clear();
    for (int thread = 0; thread < pool_.size(); thread++) {
        private_shrunk_.emplace_back(hidden * kPrivateShrunkRows);
        adapter_input_.emplace_back(input);
        ranks_.emplace_back(sizeof(float) * size_t(kChunkRows) * size_t(adapters.max_rank));
        deltas_.emplace_back(sizeof(float) *
                             size_t(std::max(kDeltaFloats, 2 * kPanelRows * arena_.max_tokens)));
        if (scratch_[size_t(thread)].size() < scratch) scratch_[size_t(thread)] = Block(scratch);
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

uint8_t* Executor::shrunk(const Op& op, int row, int thread) const {
    const bool is_private = rows_of(op) <= kPrivateShrunkRows;
    const Block& memory = is_private ? private_shrunk_[size_t(thread)] : shrunk_;
    const size_t rows = size_t(is_private ? kPrivateShrunkRows : arena_.max_tokens);
    return memory.data() + memory.size() / rows / 64 * 64 * size_t(row);
}

void Executor::shrink(const Op& op, const Segments& segments, int thread) {
    for (int i = 0; i < segments.slices; i++)
        for (const Segment& segment : segments.items[i]) {
            int total = 0, offset = 0;
            for_runs(op, segment, [&](const AdapterRun& run, const AdapterMatrices&) { total += run.rows; });
            int from = 0, to = total;
            if (!segments.is_private) {
                from = int(int64_t(total) * thread / pool_.size());
                to = int(int64_t(total) * (thread + 1) / pool_.size());
            }
            for_runs(op, segment, [&](const AdapterRun& run, const AdapterMatrices& matrices) {
                const int begin = std::clamp(from - offset, 0, run.rows);
                const int end = std::clamp(to - offset, 0, run.rows);
                offset += run.rows;
                if (begin < end)
                    shrink_rows(op, matrices, run, begin, end, thread, shrunk(op, run.first, thread));
            });
        }
}

// Computes rows [begin, end) of a run, and packs them to `out` as rows of the input of B.
void Executor::shrink_rows(const Op& op, const AdapterMatrices& matrices, const AdapterRun& run, int begin,
                           int end, int thread, uint8_t* out) {
    const int numerics = int(matrices.numerics), columns = matrices.b.columns, ranks = matrices.a.rows;
    float* hidden = ranks_[size_t(thread)].floats();
    for (int first = begin; first < end; first += kChunkRows) {
        const int rows = std::min(kChunkRows, end - first);
        const Segment chunk{matrices.numerics, &matrices.a, run.first + first, rows,
                            adapter_input_[size_t(thread)].data()};
        pack(op, chunk, 0, rows, rows_[size_t(thread)].floats());
        const Epilogue epilogue{hidden, columns, nullptr, Activation::None, false, false};
        kernels_.matmul[numerics]({&matrices.a, chunk.input, rows, epilogue}, 0, matrices.a.panels(),
                                  scratch(thread));
        for (int r = 0; r < rows; r++) std::fill_n(hidden + r * columns + ranks, columns - ranks, 0.0f);
        kernels_.pack[numerics](hidden - ptrdiff_t(first) * columns, columns, columns, run.rows, first,
                                first + rows, out);
    }
}

void Executor::multiply_adapted(const Op& op, const Segment& segment, int begin, int end, int thread) {
    const int panels = op.gated ? 2 : 1, unit_floats = panels * kPanelRows;
    const int units = std::max(1, kDeltaFloats / (segment.rows * unit_floats));
    float* delta = deltas_[size_t(thread)].floats();
    for (int unit = begin; unit < end; unit += units) {
        const int last = std::min(unit + units, end), stride = (last - unit) * unit_floats;
        // Adding -0 changes no bit of the rows without an adapter.
        std::fill_n(delta, size_t(segment.rows) * size_t(stride), -0.0f);
        for_runs(op, segment, [&](const AdapterRun& run, const AdapterMatrices& matrices) {
            float* out =
                delta + ptrdiff_t(run.first - segment.first) * stride - ptrdiff_t(unit) * unit_floats;
            const Epilogue epilogue{out, stride, nullptr, Activation::None, false, false};
            kernels_.matmul[int(matrices.numerics)](
                {&matrices.b, shrunk(op, run.first, thread), run.rows, epilogue}, unit * panels,
                last * panels, scratch(thread));
        });
        run_matmul(op, segment, unit, last, thread, delta - ptrdiff_t(unit) * unit_floats, stride);
    }
}

void Executor::add_to_embedding(int token, int size, float* out) const {
    const AdapterRun* end = batch_->runs + batch_->num_runs;
    const AdapterRun* run = std::find_if(
        batch_->runs, end, [token](const AdapterRun& each) { return token < each.first + each.rows; });
    if (run == end || token < run->first) return;
    const AdapterEmbedding& change = adapters.loaded[size_t(run->adapter)].embedding;
    const float* factors = change.a + size_t(batch_->token_ids[token]) * size_t(change.rank);
    for (int k = 0; k < change.rank; k++)
        for (int i = 0; i < size; i++) out[i] += factors[k] * change.b[size_t(k) * size_t(size) + size_t(i)];
}

}  // namespace engine
