// Runs a program for one mixed batch of prefill and decode tokens, op by op, on all threads together.
//
// An op is one or two rounds of work. The pieces of a round are independent; threads claim them from a queue.
// All threads go through the same rounds, with a barrier after each.
#pragma once
#include <memory>

#include "attention/attention.h"
#include "base/memory.h"
#include "base/threads.h"
#include "executor/program.h"

namespace engine {

struct ArenaShape {
    struct Place {
        int width;  // floats per row
        bool over_logits;
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

class Executor {
  public:
    Executor(const Kernels& kernels, int threads, const std::vector<int>& cpus);

    void set_arena(ArenaShape shape);
    void set_cache(const KvCache& shape);
    void set_frequencies(std::vector<float> frequencies, float scale);  // radians per position
    void add_program(Program program);
    // Fast mode: an op over many rows uses the per-channel int8 weights for all tokens. Without such weights
    // it computes decode tokens with prefill numerics. A token's rounding then depends on the number of rows
    // in its step.
    void set_fast(bool on) { fast_ = on; }

    // Computes the batch and fills its attention fields. finite[t] is 0 if token t produced NaN or infinity.
    void run(Batch& batch, std::vector<uint8_t>& finite);

    ThreadPool& pool() { return pool_; }
    const Kernels& kernels() const { return kernels_; }
    const KvCache& cache() const { return cache_; }
    // Row `row` of a buffer.
    float* at(int buffer, int row) const {
        return buffers_[size_t(buffer)] + size_t(row) * size_t(width(buffer));
    }
    int width(int buffer) const { return arena_.buffers[size_t(buffer)].width; }
    int max_logits() const { return arena_.max_logits; }
    uint8_t* scratch(int thread) { return scratch_[size_t(thread)].data(); }
    const Program& program(int tokens) const;

    void set_timing(bool on) { timing_ = on; }
    const std::vector<double>& op_seconds() const { return op_seconds_; }

  private:
    struct Round {
        int count;
        int grain;
    };
    void reserve_scratch();
    void plan_rounds(const Program& program);
    int rows_of(const Op& op) const;            // M dimension of the op's matmul
    bool uses_per_channel(const Op& op) const;  // in this step
    int grain_of(const Op& op) const;
    void work(const Program& program, int thread);
    template <class F>
    void round(int thread, int& index, const F& piece);

    void embed(const Op& op, int begin, int end);
    // Consecutive rows of a matmul that share numerics and weights.
    struct Segment {
        Numerics numerics;
        const Matrix* matrix;
        int first, rows;
        uint8_t* input;  // packed activations
    };
    struct Segments {
        Segment items[2];  // one may be empty
        int rows;          // in both together
        bool is_private;
    };
    Segments split(const Op& op, int thread);
    void linear(const Op& op, int thread, int& index);
    void multiply(const Op& op, const Segments& segments, int begin, int end, uint8_t* scratch);
    void pack(const Op& op, const Segment& segment, int begin, int end, float* row);
    void norm_heads(const Op& op, float* x, int heads, const float* weight) const;
    void rope_write(const Op& op, int begin, int end);
    void attention(const Op& op, int thread, int& index);
    void add_norm(const Op& op, int begin, int end, float* row);
    void gather(const Op& op, int begin, int end);
    void compute_angles(int begin, int end);

    const Kernels& kernels_;
    ThreadPool pool_;
    WorkQueue queues_[2];
    ArenaShape arena_;
    KvCache cache_{};
    Block cache_memory_, arena_memory_, parts_, shared_input_, angles_, matmul_out_;
    std::vector<Block> scratch_, private_input_, rows_;
    std::vector<float*> buffers_;
    std::vector<float> frequencies_;
    float angle_scale_ = 1;
    std::vector<Program> programs_;
    std::vector<Round> rounds_;
    AttentionSchedule schedule_;
    Batch* batch_ = nullptr;
    uint8_t* finite_ = nullptr;
    bool fast_ = false;
    bool timing_ = false;
    std::vector<double> op_seconds_;
};

}  // namespace engine
