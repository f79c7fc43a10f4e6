// How a warp of `decode.cu` attends to a tile of keys, for the query heads of one KV head. Tensor cores multiply
// in float16, which has all float8 numbers:
//
//   scores (keys x query heads) = keys (TILE x HEAD_DIM) * queries,
//   sums (HEAD_DIM x query heads) = values (HEAD_DIM x TILE) * weights.
//
// The order of the dimensions in a sum, and of the keys in a tile, is free. It is chosen so that a lane loads
// 16 neighbouring bytes at once and needs no bytes of other lanes. A lane is `line` (0 to 7) and `column` (0
// to 3) of a fragment. For two query heads, 2 * column and the next, it has two scores: of the keys in the
// slots slot_of(line) and slot_of(line) + 8, and the sums of VALUES dimensions, from line * VALUES on.

constexpr int TILE = 16;                                      // keys
constexpr int PIECE = BLOCK_SIZE < TILE ? BLOCK_SIZE : TILE;  // keys of a tile that are contiguous in memory
constexpr int PIECES = TILE / PIECE;
constexpr int BATCH = 32 / PIECES;     // tiles whose block ids the producer warp loads at once
constexpr int CHUNKS = HEAD_DIM / 64;  // pieces of 16 bytes that a lane has of a key
constexpr int VALUES = HEAD_DIM / 8;   // dimensions of the values that a lane has
constexpr int WORKERS = KV_HEADS * SPLIT;
constexpr int THREADS = 32 * (WORKERS + 1);
constexpr int SCALES = 2 * KV_HEADS * HEAD_DIM;  // where the scales are in a slot
constexpr int OWN = HEAD_DIM / 32;               // dimensions that a lane merges
constexpr u32 TILE_BYTES = TILE * SLOT_BYTES;
constexpr float NOTHING_SEEN = -1.0e30f, HIDDEN = -3.0e38f;
// Weights are multiplied by the scales of values and by this, so that float16 has them.
constexpr float VALUE_FACTOR = 4096.0f;

static_assert(HEADS <= 8, "the query heads of a KV head are the columns of one matmul");

template <int COUNT>
struct alignas(4 * COUNT) Words {
    u32 at[COUNT];
};

template <int COUNT>
struct alignas(4 * COUNT) Floats {
    float at[COUNT];
};

template <typename T>
__device__ __forceinline__ T load(const void* from) {
    return *reinterpret_cast<const T*>(from);
}

// The slot of a tile that is a line of a fragment, for the first 8 lines. Neighbouring lines are an even and an
// odd slot, and so are the first lines of neighbouring pairs. This spreads the loads of a warp over all banks.
__device__ __forceinline__ int slot_of(int line) {
    return line ^ (line >> 1 & 1);
}

__device__ __forceinline__ float over_lines(float x, bool is_sum) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
        float other = __shfl_xor_sync(~0u, x, step);
        x = is_sum ? x + other : fmaxf(x, other);
    }
    return x;
}

__device__ __forceinline__ u32 as_f16(u32 pair) {
    return IS_BF16 ? packed_f16(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)) : pair;
}

struct Worker {
    int line, column, kv_head;
    float scale;
    u32 queries[4 * CHUNKS][2];
    float sums[VALUES / 2][4], peak[2], total[2];

    __device__ __forceinline__ Worker(int kv_head, float scale)
        : line(threadIdx.x % 32 / 4), column(threadIdx.x % 4), kv_head(kv_head), scale(scale) {
#pragma unroll
        for (int index = 0; index < 2 * VALUES; ++index) sums[index / 4][index % 4] = 0.0f;
        peak[0] = peak[1] = NOTHING_SEEN;
        total[0] = total[1] = 0.0f;
    }

    __device__ __forceinline__ void load_queries(const u16* q, int token) {
        u64 head = (static_cast<u64>(token) * KV_HEADS + kv_head) * HEADS + line;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const u16* from = q + head * HEAD_DIM + 16 * (column + 4 * chunk);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Words<4> pairs{};
                if (line < HEADS) pairs = load<Words<4>>(from + 8 * half);
#pragma unroll
                for (int index = 0; index < 4; ++index) {
                    queries[4 * chunk + 2 * half + index / 2][index % 2] = as_f16(pairs.at[index]);
                }
            }
        }
    }

    // The scores of two keys and two heads, without the factor `scale`.
    __device__ __forceinline__ void score(const unsigned char* tile, float (&scores)[4]) const {
        const unsigned char* keys = tile + slot_of(line) * SLOT_BYTES + kv_head * HEAD_DIM + 16 * column;
        float even[4] = {}, odd[4] = {};
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            auto upper = load<Words<4>>(keys + 64 * chunk);
            auto lower = load<Words<4>>(keys + 8 * SLOT_BYTES + 64 * chunk);
#pragma unroll
            for (int index = 0; index < 4; ++index) {
                u32 a[4];
                unpack_fp8(upper.at[index], a[0], a[2]);
                unpack_fp8(lower.at[index], a[1], a[3]);
                const u32(&q)[2] = queries[4 * chunk + index];
                multiply_add(index % 2 ? odd : even, a, q[0], q[1]);
            }
        }
#pragma unroll
        for (int index = 0; index < 4; ++index) scores[index] = even[index] + odd[index];
    }

    // Replaces scores by softmax weights, and rescales earlier sums to the new max.
    __device__ __forceinline__ void weigh(float (&scores)[4]) {
        float fading[2];
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            float high = fmaxf(peak[head], over_lines(fmaxf(scores[head], scores[head + 2]), false));
            fading[head] = exp2_of((peak[head] - high) * scale);
            peak[head] = high;
            scores[head] = exp2_of(fmaf(scores[head], scale, -high * scale));
            scores[head + 2] = exp2_of(fmaf(scores[head + 2], scale, -high * scale));
            total[head] = fmaf(total[head], fading[head], scores[head] + scores[head + 2]);
        }
        if (!__any_sync(~0u, fading[0] != 1.0f || fading[1] != 1.0f)) return;
#pragma unroll
        for (int index = 0; index < 2 * VALUES; ++index) sums[index / 4][index % 4] *= fading[index % 2];
    }

    // Adds values, multiplied by weights, to the sums. The values of hidden keys may be NaN, so they are zeroed.
    template <bool MASKED>
    __device__ __forceinline__ void add_values(const unsigned char* tile, u32 upper, u32 lower, int begin,
                                               int end) {
        Words<VALUES / 4> values[4];
#pragma unroll
        for (int index = 0; index < 4; ++index) {
            int slot = slot_of(2 * column + index % 2) + index / 2 * 8;
            values[index] = load<Words<VALUES / 4>>(tile + slot * SLOT_BYTES +
                                                    (KV_HEADS + kv_head) * HEAD_DIM + line * VALUES);
            if (MASKED && (slot < begin || slot >= end)) values[index] = {};
        }
#pragma unroll
        for (int index = 0; index < VALUES / 2; ++index) {
            // Two dimensions of two keys, which are neighbours in a fragment.
            int order = index % 2 ? 0x7362 : 0x5140, word = index / 2;
            u32 a[4];
            unpack_fp8(__byte_perm(values[0].at[word], values[1].at[word], order), a[0], a[1]);
            unpack_fp8(__byte_perm(values[2].at[word], values[3].at[word], order), a[2], a[3]);
            multiply_add(sums[index], a, upper, lower);
        }
    }

    // Attends to the slots `begin` to `end` - 1 of a tile; without MASKED, to all slots.
    template <bool MASKED>
    __device__ __forceinline__ void attend(const unsigned char* tile, int begin, int end) {
        float scores[4], value_scales[2];
        score(tile, scores);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int slot = slot_of(line) + 8 * half;
            const unsigned char* scales = tile + slot * SLOT_BYTES + SCALES + 4 * kv_head;
            float key_scale = load<float>(scales);
            bool is_hidden = MASKED && (slot < begin || slot >= end);
            value_scales[half] = is_hidden ? 0.0f : VALUE_FACTOR * load<float>(scales + 4 * KV_HEADS);
            scores[2 * half] = is_hidden ? HIDDEN : scores[2 * half] * key_scale;
            scores[2 * half + 1] = is_hidden ? HIDDEN : scores[2 * half + 1] * key_scale;
        }
        weigh(scores);
        u32 upper = transposed(packed_f16(scores[0] * value_scales[0], scores[1] * value_scales[0]));
        u32 lower = transposed(packed_f16(scores[2] * value_scales[1], scores[3] * value_scales[1]));
        add_values<MASKED>(tile, upper, lower, begin, end);
    }

    __device__ __forceinline__ void finish() {
        total[0] = over_lines(total[0], true);
        total[1] = over_lines(total[1], true);
    }

    // Adds the sums of the other warps of the same KV head, in ascending order. All warps call it.
    __device__ __forceinline__ void gather(float* memory, int part) {
        constexpr int SIZE = 2 * VALUES + 4;
        float* own = memory + threadIdx.x;
        if (part > 0) {
#pragma unroll
            for (int index = 0; index < 2 * VALUES; ++index)
                own[index * THREADS] = sums[index / 4][index % 4];
#pragma unroll
            for (int index = 0; index < 4; ++index) {
                own[(2 * VALUES + index) * THREADS] = index < 2 ? peak[index] : total[index - 2];
            }
        }
        __syncthreads();
        for (int other = 1; other < SPLIT && part == 0; ++other) {
            const float* theirs = own + other * (32 * KV_HEADS);
#pragma unroll
            for (int head = 0; head < 2; ++head) {
                float their_peak = theirs[(SIZE - 4 + head) * THREADS], high = fmaxf(peak[head], their_peak);
                float fading = exp2_of((peak[head] - high) * scale);
                float share = exp2_of((their_peak - high) * scale);
                peak[head] = high;
                total[head] = total[head] * fading + theirs[(SIZE - 2 + head) * THREADS] * share;
#pragma unroll
                for (int index = head; index < 2 * VALUES; index += 2) {
                    float& sum = sums[index / 4][index % 4];
                    sum = sum * fading + theirs[index * THREADS] * share;
                }
            }
        }
    }

    // What turns the sums of one of the lane's two heads into a weighted mean of values.
    __device__ __forceinline__ float share(int head) const {
        return total[head] == 0.0f ? 0.0f : 1.0f / (total[head] * VALUE_FACTOR);
    }

    __device__ __forceinline__ float sum(int head, int dimension) const {
        return sums[dimension / 2][dimension % 2 * 2 + head];
    }

    // Calls put(head, place, share) for those of the lane's two heads that exist. `place` is where row `row` of an
    // output has the head, and `share` turns the head's sums into a weighted mean.
    template <typename Put>
    __device__ __forceinline__ void for_heads(int row, const Put& put) const {
        u64 first = (static_cast<u64>(row) * KV_HEADS + kv_head) * HEADS + 2 * column;
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            if (2 * column + head < HEADS) put(head, first + head, share(head));
        }
    }

    __device__ __forceinline__ void write(u16* out, int token) const {
        for_heads(token, [&](int head, u64 place, float share) {
            u16* to = out + place * HEAD_DIM + line * VALUES;
#pragma unroll
            for (int first = 0; first < VALUES; first += 8) {
                Words<4> pairs;
#pragma unroll
                for (int index = 0; index < 4; ++index) {
                    int at = first + 2 * index;
                    pairs.at[index] = packed(sum(head, at) * share, sum(head, at + 1) * share);
                }
                *reinterpret_cast<Words<4>*>(to + first) = pairs;
            }
        });
    }

    __device__ __forceinline__ void write_partial(float* partial, float* weight, int index) const {
        for_heads(index, [&](int head, u64 place, float share) {
            float* to = partial + place * HEAD_DIM + line * VALUES;
#pragma unroll
            for (int first = 0; first < VALUES; first += 4) {
                Floats<4> four;
#pragma unroll
                for (int step = 0; step < 4; ++step) four.at[step] = sum(head, first + step) * share;
                *reinterpret_cast<Floats<4>*>(to + first) = four;
            }
            if (line == 0) weight[place] = peak[head] * scale + log2_of(total[head]);
        });
    }
};
