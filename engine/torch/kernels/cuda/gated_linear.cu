// y (M, N) = silu(x g^T) * (x u^T) in 16-bit floats, on Hopper's tensor cores: the gate and up
// matmuls of an MLP. x is (M, K). w (2 N, K) has the rows of g, followed by the rows of u.
//
// Thread blocks have three warp groups. They are persistent: each processes many output tiles. A
// tile has 128 rows and COLUMNS columns of accumulators, half of them from g and half from u. One
// warp group copies tiles of x and w into a ring of STAGES buffers. The other two warp groups
// multiply 64 rows each and write the result. A cluster of CLUSTER blocks computes consecutive row
// tiles of the same columns. Each block of a cluster copies its part of w's tile to all blocks of
// the cluster (multicast).
//
// `cuda/sources.py` puts `hopper.cuh` before this file. It defines COLUMNS, STAGES, CLUSTER and the
// function `multiply`.

constexpr int ROWS = 128, DEPTH = LINE;
constexpr int PARTS = 2;  // a tile of w is copied as two boxes, one of g and one of u
constexpr u32 X_BYTES = ROWS * DEPTH * 2;
constexpr u32 W_BYTES = COLUMNS * DEPTH * 2;
constexpr u32 STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int NUM_SUMS = COLUMNS / 2;  // sums per thread: 128 threads share 64 rows
constexpr int BAND = 8;                // row tiles per band; the band's rows of x stay in the L2 cache

static_assert(CLUSTER == 1 || CLUSTER == PARTS, "each block copies one part of w");

__device__ __forceinline__ u32 block_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void sync_cluster() {
    if constexpr (CLUSTER == 1) {
        __syncthreads();
    } else {
        asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                         : "memory");
    }
}

__device__ __forceinline__ void arrive_at(u32 barrier, u32 block) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(block)
        : "memory");
}

__device__ __forceinline__ void copy_box_to_all(u32 to, const TensorMap& map, u32 barrier, int column,
                                                int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "h"(static_cast<u16>((1 << CLUSTER) - 1))
        : "memory");
}

__device__ __forceinline__ float silu(float x) {
    return __fdividef(x, 1.0f + __expf(-x));
}

struct Work {
    int m_tiles, n_tiles, k_tiles;
    u32 rank;

    __device__ __forceinline__ Work(int rows, int n_tiles, int depth) : n_tiles(n_tiles) {
        rank = CLUSTER > 1 ? block_in_cluster() : 0;
        m_tiles = (rows + CLUSTER * ROWS - 1) / (CLUSTER * ROWS);
        k_tiles = (depth + DEPTH - 1) / DEPTH;
    }

    __device__ __forceinline__ int first() const { return blockIdx.x / CLUSTER; }
    __device__ __forceinline__ int step() const { return gridDim.x / CLUSTER; }
    __device__ __forceinline__ int end() const { return m_tiles * n_tiles; }

    // Finds the first row and the column tile of tile `tile`. Tiles are numbered band by band, and
    // within a band column by column, so that consecutive tiles use the same part of w. A row
    // tile here has 128 rows for each block of the cluster.
    __device__ __forceinline__ void place(int tile, int& row, int& n) const {
        int band = tile / (BAND * n_tiles) * BAND, height = min(BAND, m_tiles - band);
        int within = tile - band * n_tiles;
        row = ((band + within % height) * CLUSTER + rank) * ROWS;
        n = within / height;
    }
};

using Stages = Ring<STAGES, STAGE_BYTES>;

struct Producer {
    const TensorMap &x_map, &w_map;
    int width;  // N

    __device__ __forceinline__ void run(Stages ring, const Work& work) const {
        for (int tile = work.first(); tile < work.end(); tile += work.step()) {
            int row, n;
            work.place(tile, row, n);
            for (int k = 0; k < work.k_tiles; ++k) {
                wait_barrier(ring.free(), ring.parity);
                expect_bytes(ring.ready(), STAGE_BYTES);
                copy_box(ring.buffer(), x_map, ring.ready(), k * DEPTH, row);
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    u32 to = ring.buffer() + X_BYTES + part * (W_BYTES / PARTS);
                    int line = part * width + n * (COLUMNS / 2);
                    if constexpr (CLUSTER == 1) {
                        copy_box(to, w_map, ring.ready(), k * DEPTH, line);
                    } else if (part == work.rank) {
                        copy_box_to_all(to, w_map, ring.ready(), k * DEPTH, line);
                    }
                }
                ring.advance();
            }
        }
    }
};

__device__ __forceinline__ float gated(const float (&sums)[NUM_SUMS], int index) {
    return silu(sums[index]) * sums[index + NUM_SUMS / 2];
}

__device__ __forceinline__ void write(const float (&sums)[NUM_SUMS], u16* y, int row, int column, int m,
                                      int width) {
    constexpr int BLOCKS = NUM_SUMS / 8;  // blocks of eight columns
    int lane = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int line = row + 8 * half;
        u16* to = y + static_cast<u64>(line) * width + column;
#pragma unroll
        for (int first = 0; first < BLOCKS; first += 4) {
            u32 pairs[4];
#pragma unroll
            for (int block = 0; block < 4; ++block) {
                int index = 4 * (first + block) + 2 * half;
                bool there = first + block < BLOCKS;
                pairs[block] =
                    there ? packed(gated(sums, there ? index : 0), gated(sums, there ? index + 1 : 1)) : 0;
            }
            uint4 values = transposed(pairs[0], pairs[1], pairs[2], pairs[3], lane);
            bool inside = first + lane < BLOCKS && column + 8 * (first + lane) < width;
            if (line < m && inside) *reinterpret_cast<uint4*>(to + 8 * (first + lane)) = values;
        }
    }
}

__device__ __forceinline__ void consume(Stages ring, const Work& work, u16* y, int m_rows, int width) {
    int thread = threadIdx.x % WARP_GROUP, group = threadIdx.x / WARP_GROUP - 1;
    float sums[NUM_SUMS];
    for (int tile = work.first(); tile < work.end(); tile += work.step()) {
        int row, n;
        u32 last = 0;
        work.place(tile, row, n);
        for (int k = 0; k < work.k_tiles; ++k) {
            wait_barrier(ring.ready(), ring.parity);
            u64 x = descriptor(ring.buffer() + group * (X_BYTES / 2)),
                w = descriptor(ring.buffer() + X_BYTES);
            hold(sums);
            begin_products();
#pragma unroll
            for (int step = 0; step < DEPTH / 16; ++step) {
                multiply(sums, x + 2 * step, w + 2 * step, k > 0 || step > 0);
            }
            commit_products();
            if (last) {
                wait_products<1>();
                if (thread < CLUSTER) arrive_at(last, thread);
            }
            last = ring.free();
            ring.advance();
        }
        wait_products<0>();
        hold(sums);
        if (thread < CLUSTER) arrive_at(last, thread);
        int line = group * (ROWS / 2) + thread / 32 * 16 + thread % 32 / 4;
        write(sums, y, row + line, n * (COLUMNS / 2), m_rows, width);
    }
}

extern "C" __global__ void __launch_bounds__(3 * WARP_GROUP, 1) __cluster_dims__(CLUSTER, 1, 1)
    gated_linear(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, u16* y,
                 int m_rows, int width, int depth, int n_tiles) {
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) u64 barriers[2 * STAGES];
    u32 stages = (shared_address(memory) + 1023) & ~1023u, full = shared_address(barriers);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(full + 8 * stage, 1);
            init_barrier(full + 8 * (STAGES + stage), 2 * CLUSTER);
        }
        publish_barriers();
    }
    sync_cluster();
    Work work(m_rows, n_tiles, depth);
    if (threadIdx.x < WARP_GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) Producer{x_map, w_map, width}.run(Stages(stages, full, 1), work);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume(Stages(stages, full, 0), work, y, m_rows, width);
    }
    sync_cluster();  // no block may exit while another can still write to its shared memory
}
