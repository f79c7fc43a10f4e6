// Runs a program (an execution plan, see program.h) op by op, for one mixed batch of prefill and
// decode tokens. All threads work on the same op.
//
// An op consists of one or two rounds of work. A round consists of independent pieces, which
// threads claim from a queue. All threads go through the same rounds and wait at a barrier after
// each.
#pragma once
#include <deque>
#include <map>
#include <memory>

#include "attention/attention.h"
#include "base/memory.h"
#include "base/threads.h"
#include "executor/adapters.h"
#include "executor/experts.h"
#include "executor/taps.h"

namespace engine {

// Sizes of the arena, the memory for activations. The arena is divided into places. Buffers that
// are never in use at the same time share a place.
struct ArenaShape {
    struct Place {
        int width;         // floats per row
        bool over_logits;  // true: one row per token with logits; false: one row per token
    };
    struct Buffer {
        int place;
        int width;
    };
    std::vector<Place> places;
    std::vector<Buffer> buffers;
    int max_tokens = 0;
    int max_logits = 0;
};

struct StateShape {
    size_t floats;  // values of one state
    int count;
};
// If a matmul has at most this many rows, each thread packs all activations for itself. This is faster than
// sharing the work and waiting at a barrier.
constexpr int kPrivateRows = 2;
constexpr int kHeadRows = 32;  // max rows that a thread multiplies at a time in HeadLinear

// Whether the result of a Linear is stored in a separate buffer first and combined with `out` afterwards.
inline bool is_apart(const Op& op) {
    return op.multiply || (op.residual && op.scale != 1);
}

class Executor {
  public:
    Executor(const Kernels& kernels, int threads, const Placement& placement);

    void set_arena(ArenaShape shape);
    // Allocates a KV cache. Cache 0 is that of layers without a sliding window. If windowed layers have a
    // cache of their own, with their own block tables, it is cache 1. Otherwise all layers use cache 0.
    void set_cache(int index, const KvCache& shape);
    // Adds a RoPE table. `frequencies` are in radians per position; `scale` multiplies cosines and
    // sines.
    void add_rope(std::vector<float> frequencies, float scale);
    // Allocates the states of sequences: `count` states of `floats` values.
    void set_states(size_t floats, int count);
    void copy_state(int from, int to);
    int num_states() const { return states_.count; }
    // A block is the part of KV cache `group` (0 or 1) that has one block id, in all layers. In group 2, a
    // block is the state of a sequence or a copy of one. Blocks are copied from and to host bytes.
    int64_t num_blocks(int group) const { return group == 2 ? states_.count : caches_[group].blocks; }
    size_t bytes_per_block(int group) const;
    void read_block(int group, int64_t block, uint8_t* out) const;
    void write_block(int group, int64_t block, const uint8_t* in);
    void add_program(Program program);
    // Turns fast mode (`--numerics fast`) on or off. In fast mode, a matmul with 16 rows or more
    // uses its per-channel int8 weights for all tokens. If it has no such weights, it computes
    // decode tokens with prefill numerics. The rounding of a token then depends on the number of
    // rows in its step.
    void set_fast(bool on) { fast_ = on; }

    // Computes the batch. finite[t] becomes 0 if the activations of token t contain NaN or infinity.
    void run(const Batch& batch, std::vector<uint8_t>& finite);
    // The places where later steps may have taps.
    void set_sites(std::vector<TapSite> sites) { sites_ = std::move(sites); }
    const std::vector<TapSite>& sites() const { return sites_; }
    // The taps of the next step. Their tokens are indices in the batch.
    void set_taps(const TapArrays& taps) { taps_ = taps; }
    // Computes only the last op, the LM head with its norm, for the first rows of its source.
    void run_head(int rows);

    ThreadPool& pool() { return pool_; }
    const Kernels& kernels() const { return kernels_; }
    const KvCache& cache(int index) const { return caches_[index]; }
    bool has_window_cache() const { return caches_[1].blocks > 0; }
    // Address of row `row` of a buffer.
    float* at(int buffer, int row) const {
        return buffers_[size_t(buffer)] + size_t(row) * size_t(width(buffer));
    }
    int width(int buffer) const { return arena_.buffers[size_t(buffer)].width; }
    int max_logits() const { return arena_.max_logits; }
    uint8_t* scratch(int thread) { return scratch_[size_t(thread)].data(); }
    const Program& program(int tokens) const;
    void normalize(const Norm& norm, const float* x, int size, float* out) const;

    // Sets adapter `index`, which replaces an earlier one. No step may run meanwhile.
    void set_adapter(int index, LoadedAdapter adapter);

    void set_timing(bool on) { timing_ = on; }
    const std::vector<double>& op_seconds() const { return op_seconds_; }

    AdapterSet adapters;

  private:
    struct Round {
        int count;
        int grain;
    };
    // The attention schedule of all layers with the same window. `batch` is the step's batch with the fields
    // of this schedule.
    struct Windowed {
        int window;
        bool centered;
        AttentionSchedule schedule;
        Batch batch;
        std::vector<int32_t> prefix_blocks;
    };
    struct Rope {
        std::vector<float> frequencies;
        float scale;
        int start;  // offset in the angles of a token
    };
    void reserve_scratch();
    void plan_attention(const Program& program, const Batch& batch);
    void use_window_cache(Windowed& windowed) const;
    void plan_rounds(const Program& program);
    int rows_of(const Op& op) const;            // number of rows (M) that the op computes in this step
    int decode_rows(const Op& op) const;        // how many of them, the first, have decode arithmetic
    bool uses_per_channel(const Op& op) const;  // whether the op uses per-channel weights in this step
    int grain_of(const Op& op) const;
    void work(const Program& program, int thread);
    // One round: the thread claims pieces until the queue is empty, then waits at the barrier. Rounds
    // use two queues alternately. While threads work on one queue, thread 0 refills the other for the
    // next round. No thread still uses that queue, because all have passed the barrier of the previous
    // round.
    template <class F>
    void round(int thread, int& index, const F& piece) {
        if (thread == 0) {
            const Round& next = rounds_[size_t(index) + 1];
            queues_[(index + 1) % 2].reset(next.count, next.grain);
        }
        WorkQueue& queue = queues_[index % 2];
        int begin, end;
        while (queue.take(thread, begin, end)) piece(begin, end);
        index++;
        pool_.barrier(thread);
    }

    void embed(const Op& op, int begin, int end);
    // Consecutive rows of a matmul that use the same numerics and the same weights.
    struct Segment {
        Numerics numerics;
        const Matrix* matrix;
        int first, rows;
        uint8_t* input;  // packed activations
    };
    // With many threads, a matmul may have fewer units than threads. Its rows are then cut into slices, and
    // each unit of each slice is a piece of work.
    static constexpr int kMaxSlices = 8, kSliceRows = 48;  // 48: a multiple of the blocks of all kernels
    struct Segments {
        Segment items[kMaxSlices][2];  // of each slice: decode rows, then prefill rows; either may be empty
        int slices;
        bool is_private;  // whether every thread packs all activations for itself
    };
    int slices_of(const Op& op) const;
    Segments split(const Op& op, int thread);
    // Writes the slices of a segment to items[0][index], items[1][index], ...
    void slice(Segments& segments, int index, const Segment& whole) const;
    void linear(const Op& op, int thread, int& index);
    void multiply(const Op& op, const Segments& segments, int begin, int end, int thread);
    void multiply_units(const Op& op, const Segment& segment, int begin, int end, int thread);
    void multiply_adapted(const Op& op, const Segment& segment, int begin, int end, int thread);
    void run_matmul(const Op& op, const Segment& segment, int begin, int end, int thread, const float* delta,
                    int delta_stride);
    bool is_adapted(const Op& op) const;  // whether an adapter of this step changes the op
    // Calls visit(run, its matrices) for the part of each run that lies in the segment.
    template <class F>
    void for_runs(const Op& op, const Segment& segment, const F& visit) const;
    // Computes A x of the rows with adapters that this thread has packed.
    void shrink(const Op& op, const Segments& segments, int thread);
    void shrink_rows(const Op& op, const AdapterMatrices& matrices, int first, int count, int thread,
                     float* out);
    void multiply_a(const AdapterMatrices& matrices, const uint8_t* input, int rows, int thread, float* out);
    void replace_rows(const Op& op, const AdapterRun& run, const AdapterMatrices& matrices, int begin,
                      int end, int thread);
    float* shrunk(const Op& op, int row, int thread) const;  // where A x of a row is stored
    void add_to_embedding(int token, int size, float* out) const;
    void reserve_adapters();
    void pack(const Op& op, const Segment& segment, int begin, int end, float* row);
    void norm_heads(const Op& op, float* x, int heads, const float* weight) const;
    void rope_write(const Op& op, int begin, int end);
    const float* angles_of(const Op& op, int token) const;
    void latent_write(const Op& op, int begin, int end);
    int head_pieces(const Op& op) const;
    void head_linear(const Op& op, int piece, int thread);
    void attention(const Op& op, int thread, int& index);
    void norm(const Op& op, int begin, int end, float* row);
    void route_rows(const Op& op, int begin, int end, float* scratch);
    void gate_rows(const Op& op, int begin, int end);
    void experts(const Op& op, int thread, int& index);
    void multiply_experts(const Op& op, bool is_up, int begin, int end, uint8_t* scratch);
    float* state(int index) const { return state_memory_.floats() + size_t(index) * states_.floats; }
    void plan_recurrent(const Op& op);
    RecurrentRow recurrent_row(const RecurrentShape& shape, int row) const;
    void recurrent(const Op& op, int thread, int& index);
    void finish_recurrent(const RecurrentJob& job, int token) const;
    void gather(const Op& op, int begin, int end);
    void mean(const Op& op, int begin, int end);
    void compute_angles(int begin, int end);
    void add_positions(const Op& op, int begin, int end);

    // Steps with taps (taps.cpp).
    struct TapGroup {
        int site;
        int begin, end;  // indices of taps
    };
    const Program& with_taps(const Program& program);
    void add_tapped(Op op, const std::vector<int>& sites);
    void add_pre_activation(const Op& op);
    void add_tap(int site, int buffer, const Op& near);
    Op tap_op(int site, int buffer, const Op& near);
    int extra_buffer(int width);
    void tap(const Op& op, int begin, int end);
    void tap_pre_activation(const Op& op, const TapGroup& group, int row, int width);
    void add_rows(const Op& op, int begin, int end);

    const Kernels& kernels_;
    ThreadPool pool_;
    WorkQueue queues_[2];
    ArenaShape arena_;
    KvCache caches_[2]{};
    StateShape states_{};
    Block state_memory_;
    Block cache_memory_[2], arena_memory_, parts_, shared_input_, angles_, matmul_out_;
    std::vector<Block> scratch_, private_input_, rows_;
    std::vector<float*> buffers_;
    std::vector<Rope> ropes_;
    int angles_per_token_ = 0;
    std::vector<Program> programs_;
    std::vector<Round> rounds_;
    std::vector<Windowed> windows_;
    ExpertBatch expert_batch_;
    const Batch* batch_ = nullptr;
    uint8_t* finite_ = nullptr;
    // For adapters: A x of all rows, the same for few rows by thread, and by thread: packed activations, and
    // B (A x) of some units.
    Block shrunk_;
    std::vector<Block> private_shrunk_, adapter_input_, deltas_;
    bool fast_ = false;
    bool timing_ = false;
    std::vector<double> op_seconds_;
    std::vector<TapSite> sites_;
    TapArrays taps_;
    Program tapped_;
    std::vector<TapGroup> tap_groups_;
    std::deque<Matrix> tap_matrices_;
    int pre_activations_ = -1;
    std::map<int, int> extra_buffers_;  // by width
    std::deque<Block> extra_memory_;
};

}  // namespace engine
