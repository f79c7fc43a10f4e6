// y = x W^T for up to 8 * TOKEN_TILES rows of x (tokens) and a matrix W of 4 or 8 bits with a scale per group, on
// Hopper. It takes as long as reading W. Norm, bias, gated activation and residual are part of it.
//
// W is tiled (`kernels/tiling.py`): 16 rows and 128 columns, a block, are contiguous, and so are the blocks of the
// same 16 rows. A thread block has a part of the columns of some row tiles. One producer thread copies
// blocks, WARPS at a time, into a ring of buffers in shared memory. WARPS workers compute one of them each. W is the
// left operand of tensor-core instructions, and the tokens are the 8 columns of the right one. One more warp adds up the
// sums of the workers for a row tile, while they go on with the next.
//
// Bits of W become bits of the fractions of 16-bit floats, by one logical instruction for two of them. So W is exact,
// plus an offset. The sums of a group start at minus the offset times the sum of the inputs, and are scaled in float32.
//
// The copies of W start before the previous kernel ends, which computes x. A thread block takes more than half of the
// shared memory, so that each multiprocessor has one. With room for two, some multiprocessors got two, and others none,
// where thread blocks of the previous kernel still were. All sums have a fixed order, also those over the parts of the
// columns.
//
// `cuda/grouped.py` puts `hopper.cuh` and `ring.cuh` before this file. It defines BITS, GROUP, MINIMA, GATE (see
// `activated`; 0: none), TOKEN_TILES, SPLITS (whether there are several parts),
// WARPS, IS_BF16 and SHARED_BYTES.

constexpr int TILE_ROWS = 16, BLOCK_COLUMNS = 128, STEP = 32;
constexpr int GROUPS = BLOCK_COLUMNS / GROUP, STEPS = BLOCK_COLUMNS / STEP;
constexpr int HALVES = GATE ? 2 : 1, TOKENS = 8 * TOKEN_TILES;
constexpr int READERS = WARPS + 1;  // warps that read the inputs: the workers and the finisher
constexpr int PRODUCER = 32 * READERS, THREADS = PRODUCER + 32;
constexpr u32 ROW_BYTES = BLOCK_COLUMNS / 8 * BITS, VALUE_BYTES = TILE_ROWS * ROW_BYTES;
constexpr u32 SCALE_BYTES = TILE_ROWS * GROUPS * 2;
constexpr u32 STAGE_BYTES = WARPS * (VALUE_BYTES + SCALE_BYTES * (1 + MINIMA));
constexpr int MAX_STAGES = 16, CHUNK = 256;  // columns of a row that a warp loads at once
constexpr int SUMS = 2;                      // row tiles that may wait for the finisher
constexpr u32 SUM_BYTES = WARPS * TOKEN_TILES * 32 * 16;
// Two 16-bit floats with fractions of zero in the bits of a value, and what they stand for.
constexpr u32 LOW = IS_BF16 ? 0x43004300 : 0x64006400, HIGH = IS_BF16 ? 0x45004500 : 0x74007400;
constexpr float LOW_OFFSET = IS_BF16 ? 128.0f : 1024.0f, HIGH_OFFSET = IS_BF16 ? 2048.0f : 16384.0f;
constexpr float OFFSET = LOW_OFFSET + (BITS == 8 ? HIGH_OFFSET : 0.0f) +
                         (MINIMA      ? 0.0f
                          : BITS == 8 ? 128.0f
                                      : 8.0f);

struct Matrices {
    const u16* x;
    const unsigned char *values, *scales, *minima;
    const u16 *bias, *norm, *residual;
    u16* out;
    float4* partial;
    int* arrived;  // the number of parts of each member that are done
};

struct Sizes {
    int tokens, columns, tiles, parts, members, x_stride, out_stride;
    float eps;
};

// What a thread block has to do: some of the units, which are row tiles, or pairs of them with a gate, and the blocks
// `begin` to `end` of their columns.
struct Work {
    int part, member, units, begin, end, blocks;

    __device__ __forceinline__ explicit Work(const Sizes& sizes)
        : part(blockIdx.x % sizes.parts),
          member(blockIdx.x / sizes.parts),
          units(sizes.tiles / HALVES),
          blocks(sizes.columns / BLOCK_COLUMNS) {
        begin = blocks * part / sizes.parts;
        end = blocks * (part + 1) / sizes.parts;
    }
};

// Where things are in shared memory. `stages` buffers are at its end.
struct Layout {
    int stages, x_stride;
    u32 barriers, squares, sums, x, buffers;

    __device__ __forceinline__ u32 sum_barriers() const { return barriers + 2 * MAX_STAGES * 8; }

    __device__ __forceinline__ Layout(const Sizes& sizes, const Work& work) {
        int columns = (work.blocks + sizes.parts - 1) / sizes.parts * BLOCK_COLUMNS;
        x_stride = columns * 2 + 64;  // so that the loads of eight tokens are spread over all banks
        barriers = SUMS * SUM_BYTES;  // after the sums of workers
        squares = barriers + 2 * (MAX_STAGES + SUMS) * 8;
        sums = squares + (sizes.tokens * ((sizes.columns + CHUNK - 1) / CHUNK) * 4 + 15) / 16 * 16;
        x = sums + columns / GROUP * TOKENS * 4;
        buffers = x + sizes.tokens * x_stride;
        stages = min(MAX_STAGES, static_cast<int>((SHARED_BYTES - buffers) / STAGE_BYTES));
    }
};

using WarpSums = Ring<SUMS, SUM_BYTES>;

// Buffers for blocks of W. Their number depends on the inputs.
struct Stages {
    u32 buffers, full;
    int count, stage = 0;
    u32 parity;

    __device__ __forceinline__ Stages(const Layout& layout, u32 memory, u32 parity)
        : buffers(memory + layout.buffers),
          full(memory + layout.barriers),
          count(layout.stages),
          parity(parity) {}
    __device__ __forceinline__ u32 offset() const { return stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 ready() const { return full + 8 * stage; }
    __device__ __forceinline__ u32 free() const { return full + 8 * (MAX_STAGES + stage); }
    __device__ __forceinline__ void advance() {
        if (++stage == count) {
            stage = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ void copy_unit(const Matrices& matrices, const Work& work, Stages& ring,
                                          int unit) {
#pragma unroll 1
    for (int half = 0; half < HALVES; ++half) {
        u64 tile = static_cast<u64>(unit + half * work.units) * work.blocks;
#pragma unroll 1
        for (int block = work.begin; block < work.end; block += WARPS) {
            u32 count = min(WARPS, work.end - block), to = ring.buffers + ring.offset();
            wait_barrier(ring.free(), ring.parity);
            expect_bytes(ring.ready(), count * (VALUE_BYTES + SCALE_BYTES * (1 + MINIMA)));
            u64 place = tile + block;
            copy_bytes_once(to, matrices.values + place * VALUE_BYTES, ring.ready(), count * VALUE_BYTES);
            to += WARPS * VALUE_BYTES;
            copy_bytes_once(to, matrices.scales + place * SCALE_BYTES, ring.ready(), count * SCALE_BYTES);
            to += WARPS * SCALE_BYTES;
            if (MINIMA)
                copy_bytes_once(to, matrices.minima + place * SCALE_BYTES, ring.ready(), count * SCALE_BYTES);
            ring.advance();
        }
    }
}

__device__ __forceinline__ void produce(const Matrices& matrices, const Sizes& sizes, const Work& work,
                                        Stages ring) {
#pragma unroll 1
    for (int unit = work.member; unit < work.units; unit += sizes.members)
        copy_unit(matrices, work, ring, unit);
}

__device__ __forceinline__ float over_lanes(float x, int lanes) {
    for (int step = 1; step < lanes; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// Eight inputs of a token, four neighbours in each half of a step of 32 columns, and the norm's weights for them.
struct Inputs {
    uint2 values[2], norm[2];
};

// Copies the inputs of this part to shared memory, in the order in which `accumulate` multiplies them, and multiplied
// by the norm's weights. It also computes the sums of groups, and with a norm the squares of each token's inputs.
struct InputWriter {
    const Matrices& matrices;
    const Sizes& sizes;
    const Work& work;
    const Layout& layout;
    unsigned char* memory;

    __device__ __forceinline__ Inputs load(int token, int column) const {
        Inputs inputs = {};
        if (column >= sizes.columns) return inputs;
        const u16* from = matrices.x + static_cast<u64>(token) * sizes.x_stride + column;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            inputs.values[half] = *reinterpret_cast<const uint2*>(from + 16 * half);
            if (matrices.norm) {
                inputs.norm[half] = *reinterpret_cast<const uint2*>(matrices.norm + column + 16 * half);
            }
        }
        return inputs;
    }

    // Returns the squares of these inputs.
    __device__ __forceinline__ float store(const Inputs& inputs, int token, int column) const {
        float values[2][4], squares = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float (&x)[4] = values[half], factors[4];
            unpack(inputs.values[half].x, x[0], x[1]);
            unpack(inputs.values[half].y, x[2], x[3]);
            if (!matrices.norm) continue;
            unpack(inputs.norm[half].x, factors[0], factors[1]);
            unpack(inputs.norm[half].y, factors[2], factors[3]);
#pragma unroll
            for (int index = 0; index < 4; ++index) squares = fmaf(x[index], x[index], squares);
            unpack(packed(x[0] * factors[0], x[1] * factors[1]), x[0], x[1]);
            unpack(packed(x[2] * factors[2], x[3] * factors[3]), x[2], x[3]);
        }
        int step = column / STEP - work.begin * STEPS, place = threadIdx.x % 4;
        bool is_own = 0 <= step && step < (work.end - work.begin) * STEPS;
        if (is_own) {
            uint4 pairs = {packed(values[0][0], values[0][2]), packed(values[1][0], values[1][2]),
                           packed(values[0][1], values[0][3]), packed(values[1][1], values[1][3])};
            unsigned char* to = memory + layout.x + token * layout.x_stride + (step * 4 + place) * 16;
            *reinterpret_cast<uint4*>(to) = pairs;
        }
        float low = (values[0][0] + values[0][1]) + (values[0][2] + values[0][3]);
        float high = (values[1][0] + values[1][1]) + (values[1][2] + values[1][3]);
        float* sums = reinterpret_cast<float*>(memory + layout.sums) + token;
        if (GROUP == 16) {
            low = over_lanes(low, 4), high = over_lanes(high, 4);
            if (is_own && place == 0) sums[2 * step * TOKENS] = low, sums[(2 * step + 1) * TOKENS] = high;
        } else {
            low = over_lanes(low + high, GROUP / 8);
            if (is_own && threadIdx.x % (GROUP / 8) == 0) sums[step * STEP / GROUP * TOKENS] = low;
        }
        return squares;
    }

    __device__ __forceinline__ void run() const {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        int start = matrices.norm ? 0 : work.begin * BLOCK_COLUMNS;
        int stop = matrices.norm ? sizes.columns : work.end * BLOCK_COLUMNS;
        int chunks = (stop - start + CHUNK - 1) / CHUNK, count = sizes.tokens * chunks;
        float* all_squares = reinterpret_cast<float*>(memory + layout.squares);
        auto load_chunk = [&](int chunk) {
            return chunk < count ? load(chunk / chunks, column_of(start, chunk % chunks, lane)) : Inputs{};
        };
        Inputs next = load_chunk(warp), after = load_chunk(warp + READERS);
#pragma unroll 1
        for (int chunk = warp; chunk < count; chunk += READERS) {
            Inputs inputs = next;
            next = after;
            after = load_chunk(chunk + 2 * READERS);
            float squares = store(inputs, chunk / chunks, column_of(start, chunk % chunks, lane));
            if (!matrices.norm) continue;
            squares = over_lanes(squares, 32);
            if (lane == 0) all_squares[chunk] = squares;
        }
    }

    __device__ __forceinline__ static int column_of(int start, int chunk, int lane) {
        return start + chunk * CHUNK + lane / 4 * STEP + lane % 4 * 4;
    }
};

template <int COUNT>
struct alignas(2 * COUNT) Halves {
    u16 at[COUNT];
};

// The scales or minima of a row of a block.
__device__ __forceinline__ void load_factors(const unsigned char* from, int row, float (&factors)[GROUPS]) {
    auto halves = *reinterpret_cast<const Halves<GROUPS>*>(from + row * GROUPS * 2);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) factors[group] = unpack_f16(halves.at[group]);
}

__device__ __forceinline__ u32 spread(u32 word, int shift, u32 exponents) {
    return masked_or(word >> shift, 0x000f000fu, exponents);
}

// Multiplies a block by the inputs of all tokens, as one warp. A lane has the rows `line` and line + 8, and the columns
// 4 * place to 4 * place + 3 of each 16.
struct Worker {
    int line = threadIdx.x % 32 / 4, place = threadIdx.x % 4;
    float y[TOKEN_TILES][4], sums[TOKEN_TILES][2][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile) {
#pragma unroll
            for (int index = 0; index < 4; ++index) y[tile][index] = 0.0f;
        }
    }

    // The sums of the inputs of a group, for the two tokens of a tile that this lane has.
    __device__ __forceinline__ float2 inputs(const float* input_sums, int group, int tile) const {
        return *reinterpret_cast<const float2*>(input_sums + group * TOKENS + tile * 8 + 2 * place);
    }

    __device__ __forceinline__ void begin_group(const float* input_sums, int group) {
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile) {
            float2 x = inputs(input_sums, group, tile);
            sums[tile][0][0] = sums[tile][0][2] = -OFFSET * x.x;
            sums[tile][0][1] = sums[tile][0][3] = -OFFSET * x.y;
#pragma unroll
            for (int index = 0; index < 4; ++index) sums[tile][1][index] = 0.0f;
        }
    }

    __device__ __forceinline__ void end_group(const float* input_sums, int group, const float (&scales)[2],
                                              const float (&minima)[2]) {
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile) {
            float2 x = inputs(input_sums, group, tile);
#pragma unroll
            for (int index = 0; index < 4; ++index) {
                float sum = GROUP > STEP ? sums[tile][0][index] + sums[tile][1][index] : sums[tile][0][index];
                y[tile][index] = fmaf(scales[index / 2], sum, y[tile][index]);
                if (MINIMA) y[tile][index] = fmaf(minima[index / 2], index % 2 ? x.y : x.x, y[tile][index]);
            }
        }
    }

    __device__ __forceinline__ void multiply_4(const u32* words, int step, const uint4 (&x)[TOKEN_TILES]) {
        const u32* from = words + line * (ROW_BYTES / 4) + (step ^ (line >> 1)) % 4 * 4 + place;
        u32 upper = from[0], lower = from[8 * ROW_BYTES / 4];
        u32 first[4] = {spread(upper, 0, LOW), spread(lower, 0, LOW), spread(upper, 4, LOW),
                        spread(lower, 4, LOW)};
        u32 second[4] = {spread(upper, 8, LOW), spread(lower, 8, LOW), spread(upper, 12, LOW),
                         spread(lower, 12, LOW)};
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile) {
            multiply_add_inputs(sums[tile][0], first, x[tile].x, x[tile].y);
            multiply_add_inputs(sums[tile][GROUP > STEP], second, x[tile].z, x[tile].w);
        }
    }

    // Half a step. The bits 0 to 3 and the bits 4 to 7 of values are multiplied one after the other.
    __device__ __forceinline__ void multiply_8(const u32* words, int step, int half,
                                               const uint4 (&x)[TOKEN_TILES]) {
        const u32* from = words + line * (ROW_BYTES / 4) + ((2 * step + half) ^ line) * 4 + place;
        u32 upper = from[0], lower = from[8 * ROW_BYTES / 4];
        u32 low[4] = {spread(upper, 0, LOW), spread(lower, 0, LOW), spread(upper, 8, LOW),
                      spread(lower, 8, LOW)};
        u32 high[4] = {spread(upper, 4, HIGH), spread(lower, 4, HIGH), spread(upper, 12, HIGH),
                       spread(lower, 12, HIGH)};
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile) {
            u32 b0 = half ? x[tile].y : x[tile].x, b1 = half ? x[tile].w : x[tile].z;
            multiply_add_inputs(sums[tile][0], low, b0, b1);
            multiply_add_inputs(sums[tile][GROUP > STEP], high, b0, b1);
        }
    }

    // `block` is the index of the block among those of this part.
    __device__ __forceinline__ void accumulate(const unsigned char* buffer, const Layout& layout,
                                               const unsigned char* memory, int block, int tokens) {
        int warp = threadIdx.x / 32;
        const u32* words = reinterpret_cast<const u32*>(buffer + warp * VALUE_BYTES);
        const unsigned char* factors = buffer + WARPS * VALUE_BYTES + warp * SCALE_BYTES;
        const float* input_sums =
            reinterpret_cast<const float*>(memory + layout.sums) + block * GROUPS * TOKENS;
        const unsigned char* from[TOKEN_TILES];
        float scales[2][GROUPS], minima[2][GROUPS] = {};
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile) {
            int token = min(tile * 8 + line, tokens - 1);  // sums of tokens past the last are not used
            from[tile] = memory + layout.x + token * layout.x_stride + (block * STEPS * 4 + place) * 16;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            load_factors(factors, line + 8 * half, scales[half]);
            if (MINIMA) load_factors(factors + WARPS * SCALE_BYTES, line + 8 * half, minima[half]);
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            uint4 x[TOKEN_TILES];
#pragma unroll
            for (int tile = 0; tile < TOKEN_TILES; ++tile) {
                x[tile] = *reinterpret_cast<const uint4*>(from[tile] + step * 64);
            }
#pragma unroll
            for (int half = 0; half < (BITS == 8 ? 2 : 1); ++half) {
                int column = step * STEP + half * (STEP / 2), width = BITS == 8 ? STEP / 2 : STEP;
                int group = column / GROUP;
                if (column % GROUP == 0) begin_group(input_sums, group);
                if (BITS == 8) {
                    multiply_8(words, step, half, x);
                } else {
                    multiply_4(words, step, x);
                }
                if ((column + width) % GROUP) continue;
                end_group(input_sums, group, {scales[0][group], scales[1][group]},
                          {minima[0][group], minima[1][group]});
            }
        }
    }
};

// The gated activation, as `activation.py` defines it.
__device__ __forceinline__ float activated(float gate, float up) {
    float exponent = gate;                                                                    // GATE 1: silu
    if (GATE == 2) exponent = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);  // gelu_tanh
    return gate / (1.0f + exp2_of(-1.4426950408889634f * exponent)) * up;
}

struct Residuals {
    float4 tiles[TOKEN_TILES];
};

// Writes the results of row tiles from the sums of all columns, as one warp.
struct Finisher {
    const Matrices& matrices;
    const Sizes& sizes;
    const Work& work;
    const Layout& layout;
    const unsigned char* memory;
    float scales[TOKEN_TILES][2];  // what the norm multiplies the results of this lane's tokens by

    __device__ __forceinline__ Finisher(const Matrices& matrices, const Sizes& sizes, const Work& work,
                                        const Layout& layout, const unsigned char* memory)
        : matrices(matrices), sizes(sizes), work(work), layout(layout), memory(memory) {
#pragma unroll
        for (int index = 0; index < 2 * TOKEN_TILES; ++index) {
            int token = index / 2 * 8 + threadIdx.x % 4 * 2 + index % 2;
            scales[index / 2][index % 2] = token < sizes.tokens ? scale_of(token) : 0.0f;
        }
    }

    // Adds up the sums of the workers for one row tile.
    __device__ __forceinline__ float4 gather(int buffer, int tile) const {
        float4 sum = {};
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            int place = ((buffer * WARPS + warp) * TOKEN_TILES + tile) * 32 + threadIdx.x % 32;
            add(sum, reinterpret_cast<const float4*>(memory)[place]);
        }
        return sum;
    }

    __device__ __forceinline__ static void add(float4& sum, const float4& other) {
        sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
    }

    // Where the sums of a part are for other thread blocks.
    __device__ __forceinline__ float4* room(int unit, int part, int index) const {
        u64 place = (static_cast<u64>(unit) * sizes.parts + part) * HALVES * TOKEN_TILES + index;
        return matrices.partial + place * 32 + threadIdx.x % 32;
    }

    // Adds up the sums of all parts.
    __device__ __forceinline__ void finish_parts(int unit) const {
        float4 totals[HALVES][TOKEN_TILES] = {};
        Residuals residuals = load_residuals(unit);
#pragma unroll 4
        for (int part = 0; part < sizes.parts; ++part) {
#pragma unroll
            for (int index = 0; index < HALVES * TOKEN_TILES; ++index) {
                add(totals[index / TOKEN_TILES][index % TOKEN_TILES], __ldcg(room(unit, part, index)));
            }
        }
        write(unit, totals, residuals);
    }

    // What the norm divides the results of a token by.
    __device__ __forceinline__ float scale_of(int token) const {
        if (!matrices.norm) return 1.0f;
        int chunks = (sizes.columns + CHUNK - 1) / CHUNK;
        const float* squares = reinterpret_cast<const float*>(memory + layout.squares) + token * chunks;
        float sum = 0.0f;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) sum += squares[chunk];
        return rsqrtf(sum / sizes.columns + sizes.eps);
    }

    __device__ __forceinline__ static float at(const float4& four, int index) {
        float low = index == 0 ? four.x : four.y, high = index == 2 ? four.z : four.w;
        return index < 2 ? low : high;
    }

    __device__ __forceinline__ static float at(const u16* values, u64 place) {
        float low, high;
        unpack(values[place], low, high);
        return low;
    }

    // The residual stream for this lane's results. It is loaded before the results are there.
    __device__ __forceinline__ Residuals load_residuals(int unit) const {
        Residuals residuals = {};
        if (!matrices.residual) return residuals;
        int row = unit * TILE_ROWS + threadIdx.x % 32 / 4, rows = work.units * TILE_ROWS;
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile) {
            int token = tile * 8 + threadIdx.x % 4 * 2;
            const u16* from = matrices.residual + static_cast<u64>(token) * rows + row;
            float4& four = residuals.tiles[tile];
            if (token < sizes.tokens) four.x = at(from, 0), four.z = at(from, 8);
            if (token + 1 < sizes.tokens) four.y = at(from, rows), four.w = at(from, rows + 8);
        }
        return residuals;
    }

    __device__ __forceinline__ void write(int token, int row, float y, float up, float residual) const {
        int rows = work.units * TILE_ROWS;
        if (matrices.bias) y += at(matrices.bias, row);
        if (GATE) y = activated(y, matrices.bias ? up + at(matrices.bias, rows + row) : up);
        matrices.out[static_cast<u64>(token) * sizes.out_stride + row] =
            static_cast<u16>(packed(y + residual, 0.0f));
    }

    __device__ __forceinline__ void write(int unit, const float4 (&totals)[HALVES][TOKEN_TILES],
                                          const Residuals& residuals) const {
        int line = threadIdx.x % 32 / 4, first = threadIdx.x % 4 * 2, row = unit * TILE_ROWS + line;
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile) {
            const float4 &y = totals[0][tile], &up = totals[HALVES - 1][tile];
#pragma unroll 1
            for (int index = 0; index < 4; ++index) {
                int token = tile * 8 + first + index % 2;
                if (token >= sizes.tokens) continue;
                float scale = index % 2 ? scales[tile][1] : scales[tile][0];
                write(token, row + index / 2 * 8, at(y, index) * scale, at(up, index) * scale,
                      at(residuals.tiles[tile], index));
            }
        }
    }

    __device__ __forceinline__ void run(WarpSums ring) const {
        for (int unit = work.member; unit < work.units; unit += sizes.members) {
            float4 totals[HALVES][TOKEN_TILES];
            Residuals residuals = SPLITS ? Residuals{} : load_residuals(unit);
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                wait_barrier(ring.ready(), ring.parity);
#pragma unroll
                for (int tile = 0; tile < TOKEN_TILES; ++tile) totals[half][tile] = gather(ring.stage, tile);
                __syncwarp();
                if (threadIdx.x % 32 == 0) arrive(ring.free());
                ring.advance();
            }
            if (!SPLITS) {
                write(unit, totals, residuals);
                continue;
            }
#pragma unroll
            for (int index = 0; index < HALVES * TOKEN_TILES; ++index) {
                *room(unit, work.part, index) = totals[index / TOKEN_TILES][index % TOKEN_TILES];
            }
        }
    }
};

// Computes the sums of this warp's blocks for a row tile.
__device__ __forceinline__ void multiply_tile(Worker& worker, const Sizes& sizes, const Work& work,
                                              const Layout& layout, unsigned char* memory, Stages& ring,
                                              WarpSums& sums) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    worker.clear();
    for (int block = work.begin + warp; block - warp < work.end; block += WARPS) {
        wait_barrier(ring.ready(), ring.parity);
        if (block < work.end) {
            worker.accumulate(memory + layout.buffers + ring.offset(), layout, memory, block - work.begin,
                              sizes.tokens);
        }
        __syncwarp();
        if (lane == 0) arrive(ring.free());
        ring.advance();
    }
    wait_barrier(sums.free(), sums.parity);
#pragma unroll
    for (int index = 0; index < TOKEN_TILES; ++index) {
        const float (&y)[4] = worker.y[index];
        int place = ((sums.stage * WARPS + warp) * TOKEN_TILES + index) * 32 + lane;
        reinterpret_cast<float4*>(memory)[place] = {y[0], y[1], y[2], y[3]};
    }
    __syncwarp();
    if (lane == 0) arrive(sums.ready());
    sums.advance();
}

__device__ __forceinline__ void multiply(const Sizes& sizes, const Work& work, const Layout& layout,
                                         unsigned char* memory, Stages ring, WarpSums sums) {
    Worker worker;
#pragma unroll 1
    for (int unit = work.member; unit < work.units; unit += sizes.members) {
#pragma unroll 1
        for (int half = 0; half < HALVES; ++half) {
            multiply_tile(worker, sizes, work, layout, memory, ring, sums);
        }
    }
}

// The last thread block of a member's parts finishes the rows of all of them.
__device__ __forceinline__ void finish_parts(const Finisher& finisher, int* arrived, unsigned char* memory) {
    const Work& work = finisher.work;
    int warp = threadIdx.x / 32, *is_last = reinterpret_cast<int*>(memory);
    __threadfence();
    sync_threads(PRODUCER);
    if (warp == 0) *is_last = arrives_last(arrived + work.member, finisher.sizes.parts);
    sync_threads(PRODUCER);
    if (!*is_last) return;
    int members = finisher.sizes.members;
    for (int unit = work.member + warp * members; unit < work.units; unit += READERS * members) {
        finisher.finish_parts(unit);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    grouped_linear(const u16* x, const unsigned char* values, const unsigned char* scales,
                   const unsigned char* minima, const u16* bias, const u16* norm, const u16* residual,
                   u16* out, float4* partial, int* arrived, int tokens, int columns, int tiles, int parts,
                   int members, int x_stride, int out_stride, float eps) {
    extern __shared__ uint4 shared[];
    launch_dependents();
    Matrices matrices{x, values, scales, minima, bias, norm, residual, out, partial, arrived};
    Sizes sizes{tokens, columns, tiles, parts, members, x_stride, out_stride, eps};
    Work work(sizes);
    Layout layout(sizes, work);
    unsigned char* memory = reinterpret_cast<unsigned char*>(shared);
    u32 start = shared_address(memory);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < layout.stages; ++stage) {
            init_barrier(start + layout.barriers + 8 * stage, 1);
            init_barrier(start + layout.barriers + 8 * (MAX_STAGES + stage), WARPS);
        }
        for (int stage = 0; stage < SUMS; ++stage) {
            init_barrier(start + layout.sum_barriers() + 8 * stage, WARPS);
            init_barrier(start + layout.sum_barriers() + 8 * (SUMS + stage), 1);
        }
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x >= PRODUCER) {
        if (threadIdx.x == PRODUCER) produce(matrices, sizes, work, Stages(layout, start, 1));
        return;
    }
    wait_for_previous();
    InputWriter{matrices, sizes, work, layout, memory}.run();
    sync_threads(PRODUCER);
    bool is_worker = threadIdx.x < 32 * WARPS;
    if (is_worker) {
        WarpSums sums(start, start + layout.sum_barriers(), 1);
        multiply(sizes, work, layout, memory, Stages(layout, start, 0), sums);
        if (!SPLITS) return;
    }
    Finisher finisher(matrices, sizes, work, layout, memory);
    if (!is_worker) finisher.run(WarpSums(start, start + layout.sum_barriers(), 0));
    if (SPLITS) finish_parts(finisher, arrived, memory);
}
