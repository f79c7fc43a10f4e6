// Decode attention over a paged KV cache in float8, on Hopper. It is used for sequences with one query in a
// step.
//
// A thread block handles one span of a sequence's keys, for all KV heads. The slots of a page are contiguous,
// with the keys, values and scales of all heads. So one producer warp copies whole slots, TILE at a time, into
// a ring of buffers in shared memory, by one bulk copy per tile. Each KV head has SPLIT warps, which take turns
// at tiles and share nothing before the end. `decode.cuh` has what a warp computes.
//
// The kernel may start before the previous one ends, which writes the queries, and the last key of each sequence.
// Until then, it reads the work lists and copies other keys.
//
// `cuda/decode.py` puts `hopper.cuh`, `ring.cuh` and `decode.cuh` before this file. It defines HEAD_DIM, HEADS
// (query heads per KV head), KV_HEADS, BLOCK_SIZE, SLOT_BYTES, WINDOW (0: none), STAGES, SPLIT, MERGES (whether
// the last thread block of a sequence merges the results of all spans) and IS_BF16 (whether queries and results
// are bfloat16).

using Tiles = Ring<STAGES, TILE_BYTES>;

struct Lists {
    const int *counts, *spans, *partials, *query_start, *seq_lens, *tables;
};

struct Span {
    bool exists;
    int row, first, last, partial, token, first_partial, num_partials, num_tiles, first_seen;
    const int* table;

    // The loads of each half do not depend on each other, so that only two of them are waited for.
    __device__ __forceinline__ Span(const Lists& lists, int index) {
        const int *counts = lists.counts, *span = lists.spans + 4 * index;
        int width = counts[0], number = counts[1], start = counts[4];
        row = span[0], first = span[1], last = span[2], partial = span[3];
        exists = index < number;
        if (!exists) return;
        table = lists.tables + start + static_cast<u64>(row) * width;
        int length = lists.seq_lens[row];
        token = lists.query_start[row];
        first_partial = lists.partials[2 * row];
        num_partials = lists.partials[2 * row + 1];
        last = min(last, length);
        first_seen = WINDOW > 0 ? length - WINDOW : 0;
        // Blocks that the window has left may be freed, so they are not read.
        if (WINDOW > 0) first = max(first, first_seen / PIECE * PIECE);
        num_tiles = max(0, (last - first + TILE - 1) / TILE);
    }
};

__device__ __forceinline__ void produce(const Span& span, const unsigned char* cache, Tiles ring) {
    int lane = threadIdx.x % 32, step = BATCH * TILE, position = span.first + lane * PIECE;
    int next = position < span.last ? span.table[position / BLOCK_SIZE] : 0;
    for (int start = span.first; start < span.last; start += step) {
        int blocks = next;
        position += step;
        next = position < span.last ? span.table[position / BLOCK_SIZE] : 0;
        for (int tile = start; tile < min(start + step, span.last); tile += TILE) {
            int from = tile + lane % PIECES * PIECE, count = min(PIECE, span.last - from);
            int block = __shfl_sync(~0u, blocks, (tile - start) / PIECE + lane % PIECES);
            wait_barrier(ring.free(), ring.parity);
            // The previous kernel writes the last key of the sequence.
            if (tile + TILE >= span.last) wait_for_previous();
            if (lane == 0) expect_bytes(ring.ready(), min(TILE, span.last - tile) * SLOT_BYTES);
            __syncwarp();
            if (lane < PIECES && count > 0) {
                u64 slot = static_cast<u64>(block) * BLOCK_SIZE + from % BLOCK_SIZE;
                u32 to = ring.buffer() + lane * (PIECE * SLOT_BYTES);
                copy_bytes(to, cache + slot * SLOT_BYTES, ring.ready(), count * SLOT_BYTES);
            }
            ring.advance();
        }
    }
}

// Attends to the tiles of a span, each SPLIT-th of them.
__device__ __forceinline__ void consume(Worker& worker, const Span& span, const unsigned char* memory,
                                        Tiles ring, int part) {
    for (int index = 0; index < span.num_tiles; ++index) {
        if (index % SPLIT == part) {
            int start = span.first + index * TILE, begin = span.first_seen - start, end = span.last - start;
            const unsigned char* tile = memory + ring.stage * TILE_BYTES;
            wait_barrier(ring.ready(), ring.parity);
            if (begin > 0 || end < TILE) {
                worker.attend<true>(tile, begin, end);
            } else {
                worker.attend<false>(tile, begin, end);
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrive(ring.free());
        }
        ring.advance();
    }
    worker.finish();
}

// Loads what other multiprocessors wrote, past the L1 cache.
template <int COUNT>
__device__ __forceinline__ Floats<COUNT> load_partial(const float* from) {
    Floats<COUNT> values;
    if constexpr (COUNT == 4) {
        float4 four = __ldcg(reinterpret_cast<const float4*>(from));
        values = {{four.x, four.y, four.z, four.w}};
    } else {
        float2 two = __ldcg(reinterpret_cast<const float2*>(from));
        values = {{two.x, two.y}};
    }
    return values;
}

// Computes the weighted mean of the partial results of a sequence, for the query heads of one KV head.
__device__ __forceinline__ void merge(const Span& span, int kv_head, const float* partial,
                                      const float* weight, u16* out) {
    int lane = threadIdx.x % 32;
    float sums[HEADS][OWN] = {}, peak[HEADS], total[HEADS] = {};
#pragma unroll
    for (int head = 0; head < HEADS; ++head) peak[head] = NOTHING_SEEN;
#pragma unroll(HEADS > 4 ? 2 : 4)
    for (int index = 0; index < span.num_partials; ++index) {
        u64 first = (static_cast<u64>(span.first_partial + index) * KV_HEADS + kv_head) * HEADS;
#pragma unroll
        for (int head = 0; head < HEADS; ++head) {
            auto part = load_partial<OWN>(partial + (first + head) * HEAD_DIM + lane * OWN);
            float own = __ldcg(weight + first + head), high = fmaxf(peak[head], own);
            float fading = exp2_of(peak[head] - high), share = exp2_of(own - high);
            peak[head] = high;
            total[head] = fmaf(total[head], fading, share);
#pragma unroll
            for (int step = 0; step < OWN; ++step) {
                sums[head][step] = fmaf(sums[head][step], fading, part.at[step] * share);
            }
        }
    }
    u64 first = (static_cast<u64>(span.token) * KV_HEADS + kv_head) * HEADS;
#pragma unroll
    for (int head = 0; head < HEADS; ++head) {
        float share = total[head] == 0.0f ? 0.0f : 1.0f / total[head];
        Words<OWN / 2> pairs;
#pragma unroll
        for (int step = 0; step < OWN; step += 2) {
            pairs.at[step / 2] = packed(sums[head][step] * share, sums[head][step + 1] * share);
        }
        *reinterpret_cast<Words<OWN / 2>*>(out + (first + head) * HEAD_DIM + lane * OWN) = pairs;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    decode_rows(const u16* q, const unsigned char* cache, u16* out, float* partial, float* weight,
                int* arrived, const int* counts, const int* spans, const int* partials,
                const int* query_start, const int* seq_lens, const int* tables, float scale) {
    extern __shared__ uint4 shared[];
    launch_dependents();
    Span span({counts, spans, partials, query_start, seq_lens, tables}, blockIdx.x);
    if (!span.exists) {
        wait_for_previous();  // so that this kernel never ends before the previous one
        return;
    }
    unsigned char* memory = reinterpret_cast<unsigned char*>(shared);
    u32 buffers = shared_address(memory), barriers = buffers + STAGES * TILE_BYTES;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(barriers + 8 * stage, 1);
            init_barrier(barriers + 8 * (STAGES + stage), KV_HEADS);
        }
        publish_barriers();
    }
    __syncthreads();
    int warp = threadIdx.x / 32, kv_head = warp % KV_HEADS, part = warp / KV_HEADS;
    if (warp == WORKERS) {
        produce(span, cache, Tiles(buffers, barriers, 1));
        if (SPLIT > 1) __syncthreads();  // twice, as in the other warps
        if (SPLIT > 1) __syncthreads();
        return;
    }
    Worker worker(kv_head, scale);
    wait_for_previous();
    worker.load_queries(q, span.token);
    consume(worker, span, memory, Tiles(buffers, barriers, 0), part);
    if (SPLIT > 1) {
        __syncthreads();  // the ring is free
        worker.gather(reinterpret_cast<float*>(memory), part);
        if (part > 0) return;
    }
    if (MERGES && span.num_partials == 1) {
        worker.write(out, span.token);
        return;
    }
    worker.write_partial(partial, weight, span.partial);
    if (MERGES && arrives_last(arrived + span.row * KV_HEADS + kv_head, span.num_partials)) {
        merge(span, kv_head, partial, weight, out);
    }
}
