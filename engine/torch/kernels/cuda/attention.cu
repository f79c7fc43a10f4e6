// Prefill attention over the paged KV cache, on Hopper's tensor cores. It is used for sequences with several
// queries in a step.
//
// Thread blocks are persistent: each processes many work items. An item is a tile of one sequence's queries,
// for all query heads that share a KV head. A line of the tile is one token and one query head. One producer
// warp copies queries, keys and values into shared memory, page by page. Each of WORKERS warp groups computes
// 64 lines. In its registers are the scores for a tile of KEYS keys, the softmax weights of the previous key
// tile, and the output sums. The softmax of a key tile overlaps the matmul of the previous tile's weights by
// its values. Warp groups take turns at starting matmuls, so that the matmuls of one group run while another
// group computes its softmax. Key tiles are processed from last to first, so the tiles on the diagonal, which
// need a mask, come first.
//
// `cuda/sources.py` puts `hopper.cuh` before this file. It defines HEAD_DIM, HEADS (query heads per KV head),
// KV_HEADS, BLOCK_SIZE, WORKERS, STAGES, WINDOW (0: none), `multiply_keys` and `multiply_values`.

constexpr int KEYS = 128;
constexpr int PARTS = HEAD_DIM / LINE;  // 128-byte pieces of a head's vector
constexpr int LINES = 64 * WORKERS;
constexpr int TOKENS = LINES / HEADS;
constexpr int PAGES = KEYS / BLOCK_SIZE;  // pages per key tile
constexpr u32 QUERY_BYTES = LINES * HEAD_DIM * 2;
constexpr u32 TILE_BYTES = KEYS * HEAD_DIM * 2;
constexpr u32 PART_BYTES = KEYS * LINE_BYTES;
constexpr int NUM_SCORES = KEYS / 2;  // scores per thread: 128 threads share 64 lines
constexpr int NUM_SUMS = HEAD_DIM / 2;
constexpr float NOTHING_SEEN = -1.0e30f, HIDDEN = -3.0e38f;

// Ids of hardware barriers. Each warp group has two: one for its own threads, and one at which it waits for
// its turn to start matmuls.
constexpr int FIRST_OWN = 1, FIRST_TURN = FIRST_OWN + WORKERS;

static_assert(PAGES * PARTS <= 32, "each lane copies a page of a part");

struct Lists {
    const int *counts, *tiles, *query_start, *seq_lens, *tables;
};

struct Item {
    int kv_head, first_token, num_queries, length, first_position, first_tile, last_tile;
    const int* table;

    __device__ __forceinline__ Item(const Lists& lists, int index) {
        const int* tile = lists.tiles + 2 * (index / KV_HEADS);
        int row = tile[0], first_query = tile[1], row_start = lists.query_start[row];
        kv_head = index % KV_HEADS;
        length = lists.seq_lens[row];
        table = lists.tables + lists.counts[4] + static_cast<u64>(row) * lists.counts[0];
        first_token = row_start + first_query;
        num_queries = min(TOKENS, lists.query_start[row + 1] - first_token);
        first_position = length - (lists.query_start[row + 1] - first_token);
        first_tile = WINDOW > 0 ? max(0, first_position - WINDOW + 1) / KEYS : 0;
        last_tile = (first_position + num_queries - 1) / KEYS;
    }
};

// The list of items is sorted from long to short. Thread blocks take items in snake order: forward in one
// round, backward in the next. This balances their work.
struct Items {
    int total, round = 0;

    __device__ __forceinline__ explicit Items(const Lists& lists) : total(lists.counts[2] * KV_HEADS) {}
    __device__ __forceinline__ int next() {
        int place = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
        int index = round++ * gridDim.x + place;
        return index < total ? index : -1;
    }
};

using Tiles = Ring<STAGES, TILE_BYTES>;

struct Shared {
    u32 queries, keys, values;                                  // buffers
    u32 queries_ready, queries_free, keys_ready, values_ready;  // barriers
};

struct Producer {
    const TensorMap &q_map, &cache_map;
    int num_slots;

    // Copies a tile of keys or values. Each lane copies one page of one part (64 dimensions of the head). For
    // pages past the end of the sequence, `slot` is out of bounds, and the copy engine writes zeros.
    __device__ __forceinline__ void copy_tile(Tiles& ring, int column, int slot) const {
        int lane = threadIdx.x % 32, page = lane % PAGES, part = lane / PAGES;
        wait_barrier(ring.free(), ring.parity);
        if (lane == 0) expect_bytes(ring.ready(), TILE_BYTES);
        __syncwarp();
        if (part < PARTS) {
            u32 to = ring.buffer() + part * PART_BYTES + page * (BLOCK_SIZE * LINE_BYTES);
            copy_box(to, cache_map, ring.ready(), column + part * LINE, slot);
        }
        ring.advance();
    }

    __device__ __forceinline__ void run(const Lists& lists, const Shared& shared) const {
        Tiles keys(shared.keys, shared.keys_ready, 1), values(shared.values, shared.values_ready, 1);
        Items items(lists);
        int lane = threadIdx.x % 32;
        u32 parity = 1;
        for (int index; (index = items.next()) >= 0; parity ^= 1) {
            Item item(lists, index);
            if (lane == 0) {
                wait_barrier(shared.queries_free, parity);
                expect_bytes(shared.queries_ready, TOKENS * HEADS * HEAD_DIM * 2);
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    copy_heads(shared.queries + part * (LINES * LINE_BYTES), q_map, shared.queries_ready,
                               part * LINE, item.kv_head * HEADS, item.first_token);
                }
            }
            for (int tile = item.last_tile; tile >= item.first_tile; --tile) {
                int position = tile * KEYS + lane % PAGES * BLOCK_SIZE;
                // Blocks that the window has left may be freed, so they are not read.
                bool is_seen = position < item.length &&
                               (WINDOW == 0 || position + BLOCK_SIZE > item.first_position - WINDOW + 1);
                int slot = is_seen ? item.table[position / BLOCK_SIZE] * BLOCK_SIZE : num_slots;
                copy_tile(keys, item.kv_head * HEAD_DIM, slot);
                copy_tile(values, (KV_HEADS + item.kv_head) * HEAD_DIM, slot);
            }
        }
    }
};

__device__ __forceinline__ float largest_of_four(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float sum_of_four(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// The state of the online softmax for one line: one token and one query head. A thread has two lines.
struct Line {
    int number, position;
    float peak, total, fading;

    __device__ __forceinline__ void begin(int line, const Item& item) {
        number = line;
        position = item.first_position + line / HEADS;
        peak = NOTHING_SEEN;
        total = 0.0f;
    }

    template <int OFFSET>
    __device__ __forceinline__ void mask(float (&scores)[NUM_SCORES], int tile) const {
        int key = tile * KEYS + threadIdx.x % 4 * 2;
#pragma unroll
        for (int index = 0; index < NUM_SCORES / 4; ++index) {
#pragma unroll
            for (int next = 0; next < 2; ++next) {
                int distance = position - (key + 8 * index + next);
                bool seen = distance >= 0 && (WINDOW == 0 || distance < WINDOW);
                if (!seen) scores[4 * index + OFFSET + next] = HIDDEN;
            }
        }
    }

    // Replaces scores by softmax weights. Sets `fading`, which rescales earlier sums to the new max.
    template <int OFFSET>
    __device__ __forceinline__ void weigh(float (&scores)[NUM_SCORES], float scale) {
        float high = peak;
#pragma unroll
        for (int index = 0; index < NUM_SCORES / 4; ++index) {
            high = fmaxf(high, fmaxf(scores[4 * index + OFFSET], scores[4 * index + OFFSET + 1]));
        }
        high = largest_of_four(high);
        fading = exp2_of((peak - high) * scale);
        peak = high;
        float base = high * scale, sum = 0.0f;
#pragma unroll
        for (int index = 0; index < NUM_SCORES / 4; ++index) {
#pragma unroll
            for (int next = 0; next < 2; ++next) {
                float& score = scores[4 * index + OFFSET + next];
                score = exp2_of(fmaf(score, scale, -base));
                sum += score;
            }
        }
        total = total * fading + sum;
    }
};

struct Worker {
    const Shared& shared;
    float scale;
    int group, thread;
    Tiles keys, values;
    Line upper, lower;  // the thread's two lines; their numbers differ by eight
    float scores[NUM_SCORES], sums[NUM_SUMS];
    u32 weights[NUM_SCORES / 2];

    __device__ __forceinline__ Worker(const Shared& shared, float scale)
        : shared(shared),
          scale(scale),
          group(threadIdx.x / WARP_GROUP - 1),
          thread(threadIdx.x % WARP_GROUP),
          keys(shared.keys, shared.keys_ready, 0),
          values(shared.values, shared.values_ready, 0) {}

    __device__ __forceinline__ void release(u32 barrier) const {
        if (thread == 0) arrive(barrier);
    }

    __device__ __forceinline__ void await_turn() const {
        asm volatile("bar.sync %0, %1;" ::"r"(FIRST_TURN + group), "n"(2 * WARP_GROUP) : "memory");
    }

    __device__ __forceinline__ void give_turn_to(int next) const {
        asm volatile("bar.arrive %0, %1;" ::"r"(FIRST_TURN + next), "n"(2 * WARP_GROUP) : "memory");
    }

    __device__ __forceinline__ void launch_scores() {
        wait_barrier(keys.ready(), keys.parity);
        hold(scores);
        begin_products();
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            u64 q = descriptor(shared.queries + part * (LINES * LINE_BYTES) + group * (64 * LINE_BYTES));
            u64 k = descriptor(keys.buffer() + part * PART_BYTES);
#pragma unroll
            for (int step = 0; step < LINE / 16; ++step) {
                multiply_keys(scores, q + 2 * step, k + 2 * step, part > 0 || step > 0);
            }
        }
        commit_products();
    }

    __device__ __forceinline__ void launch_sums(bool adds) {
        u64 v = descriptor(values.buffer(), PART_BYTES);
        hold(sums);
        hold(weights);
        begin_products();
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) {
            multiply_values(sums, weights[4 * step], weights[4 * step + 1], weights[4 * step + 2],
                            weights[4 * step + 3], v + step * (16 * LINE_BYTES >> 4), adds || step > 0);
        }
        commit_products();
    }

    __device__ __forceinline__ void weigh(int tile, int lowest, int highest) {
        hold(scores);
        if (tile * KEYS + KEYS - 1 > lowest || (WINDOW > 0 && tile * KEYS <= highest - WINDOW)) {
            upper.mask<0>(scores, tile);
            lower.mask<2>(scores, tile);
        }
        upper.weigh<0>(scores, scale);
        lower.weigh<2>(scores, scale);
        hold(scores);
    }

    __device__ __forceinline__ void pack() {
#pragma unroll
        for (int index = 0; index < NUM_SCORES / 2; ++index) {
            weights[index] = packed(scores[2 * index], scores[2 * index + 1]);
        }
    }

    // Zeroes the values past the end of the sequence, in its last page. They may be NaN. Their softmax
    // weight is 0, but 0 * NaN is NaN.
    __device__ __forceinline__ void clear_behind(int tile, int length) {
        int first = length - tile * KEYS, last = (first + BLOCK_SIZE - 1) / BLOCK_SIZE * BLOCK_SIZE;
        if (first >= KEYS || first == last) return;
        int count = (last - first) * PARTS * (LINE_BYTES / 16);
        for (int index = thread; index < count; index += WARP_GROUP) {
            int chunk = index % (LINE_BYTES / 16), line = index / (LINE_BYTES / 16);
            u32 to = values.buffer() + line % PARTS * PART_BYTES + (first + line / PARTS) * LINE_BYTES;
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to + 16 * chunk), "r"(0)
                         : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;\nbar.sync %0, %1;" ::"r"(FIRST_OWN + group),
                     "n"(WARP_GROUP)
                     : "memory");
    }

    __device__ __forceinline__ void fade() {
        if (!__any_sync(~0u, upper.fading != 1.0f || lower.fading != 1.0f)) return;
#pragma unroll
        for (int index = 0; index < NUM_SUMS; ++index) {
            sums[index] *= index % 4 < 2 ? upper.fading : lower.fading;
        }
    }

    __device__ __forceinline__ void attend(const Item& item, u32 parity) {
        int line = group * 64 + thread / 32 * 16 + thread % 32 / 4;
        upper.begin(line, item);
        lower.begin(line + 8, item);
        int lowest = item.first_position + group * 64 / HEADS;
        int highest = item.first_position + (group * 64 + 63) / HEADS;
        wait_barrier(shared.queries_ready, parity);
        launch_scores();
        wait_products<0>();
        release(keys.free());
        keys.advance();
        weigh(item.last_tile, lowest, highest);
        pack();
        wait_barrier(values.ready(), values.parity);
        clear_behind(item.last_tile, item.length);
        for (int tile = item.last_tile - 1; tile >= item.first_tile; --tile) {
            await_turn();
            launch_scores();
            wait_barrier(values.ready(), values.parity);
            launch_sums(tile + 1 < item.last_tile);
            give_turn_to((group + 1) % WORKERS);
            wait_products<1>();
            weigh(tile, lowest, highest);
            // The totals are never negative, so the comparison adds 0, which the compiler does not know. This
            // keeps the compiler from moving the softmax behind the wait for the running matmul.
            release(keys.free() + (upper.total + lower.total < 0.0f));
            keys.advance();
            wait_products<0>();
            hold(sums);
            hold(weights);
            release(values.free());
            values.advance();
            fade();
            pack();
        }
        release(shared.queries_free);
        wait_barrier(values.ready(), values.parity);
        launch_sums(item.last_tile > item.first_tile);
        wait_products<0>();
        hold(sums);
        hold(weights);
        release(values.free());
        values.advance();
    }

    template <int OFFSET>
    __device__ __forceinline__ void write(const Line& line, const Item& item, u16* out) {
        int token = line.number / HEADS, head = line.number % HEADS, lane = thread % 4;
        bool there = token < item.num_queries && line.number < TOKENS * HEADS;
        u64 heads = static_cast<u64>(item.first_token + token) * KV_HEADS + item.kv_head;
        u16* to = out + (heads * HEADS + head) * HEAD_DIM + 8 * lane;
        float total = sum_of_four(line.total), share = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
        for (int first = 0; first < HEAD_DIM / 8; first += 4) {
            u32 pairs[4];
#pragma unroll
            for (int block = 0; block < 4; ++block) {
                int index = 4 * (first + block) + OFFSET;
                pairs[block] = packed(sums[index] * share, sums[index + 1] * share);
            }
            uint4 values = transposed(pairs[0], pairs[1], pairs[2], pairs[3], lane);
            if (there) *reinterpret_cast<uint4*>(to + 8 * first) = values;
        }
    }
};

extern "C" __global__ void __launch_bounds__((WORKERS + 1) * WARP_GROUP, 1)
    attend_prompts(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap cache_map,
                   u16* out, const int* counts, const int* tiles, const int* query_start, const int* seq_lens,
                   const int* tables, float scale, int num_slots) {
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) u64 barriers[2 + 4 * STAGES];
    u32 start = (shared_address(memory) + 1023) & ~1023u, barrier = shared_address(barriers);
    Shared shared{start,
                  start + QUERY_BYTES,
                  start + QUERY_BYTES + STAGES * TILE_BYTES,
                  barrier,
                  barrier + 8,
                  barrier + 16,
                  barrier + 16 + 16 * STAGES};
    if (threadIdx.x == 0) {
        init_barrier(shared.queries_ready, 1);
        init_barrier(shared.queries_free, WORKERS);
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(shared.keys_ready + 8 * stage, 1);
            init_barrier(shared.keys_ready + 8 * (STAGES + stage), WORKERS);
            init_barrier(shared.values_ready + 8 * stage, 1);
            init_barrier(shared.values_ready + 8 * (STAGES + stage), WORKERS);
        }
        publish_barriers();
    }
    __syncthreads();
    Lists lists{counts, tiles, query_start, seq_lens, tables};
    if (threadIdx.x < WARP_GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(WORKERS == 2 ? 40 : 32));
        if (threadIdx.x < 32) Producer{q_map, cache_map, num_slots}.run(lists, shared);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WORKERS == 2 ? 232 : 160));
        Worker worker(shared, scale);
        if (worker.group == WORKERS - 1) worker.give_turn_to(0);
        Items items(lists);
        u32 parity = 0;
        for (int index; (index = items.next()) >= 0; parity ^= 1) {
            Item item(lists, index);
            worker.attend(item, parity);
            worker.write<0>(worker.upper, item, out);
            worker.write<2>(worker.lower, item, out);
        }
    }
}
