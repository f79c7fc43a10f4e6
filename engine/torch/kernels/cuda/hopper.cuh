// Code that the CUDA kernels for Hopper share: WGMMA and warp matmuls, TMA copies, barriers.
// `cuda/sources.py` defines IN, the type of the inputs ("bf16" or "f16").

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int WARP_GROUP = 128;  // threads per warp group
constexpr int LINE = 64;         // number of 16-bit values in a 128-byte swizzle row
constexpr u32 LINE_BYTES = LINE * 2;

struct alignas(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Waits for the previous kernel, if this one was launched to overlap with it. From here on, its results are
// visible.
__device__ __forceinline__ void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next kernel start, if it was launched to overlap with this one.
__device__ __forceinline__ void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the first `count` threads of the thread block are here.
__device__ __forceinline__ void sync_threads(int count) {
    asm volatile("bar.sync 1, %0;" ::"r"(count) : "memory");
}

__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

// Makes new barriers known to the copy engine.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, u32 barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}

__device__ __forceinline__ void copy_heads(u32 to, const TensorMap& map, u32 barrier, int column, int head,
                                           int token) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(column), "r"(head), "r"(token)
        : "memory");
}

// Copies bytes that are contiguous. Addresses and size are multiples of 16.
__device__ __forceinline__ void copy_bytes(u32 to, const void* from, u32 barrier, u32 bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::"r"(to),
        "l"(from), "r"(barrier), "r"(bytes)
        : "memory");
}

// The same for bytes that nothing else reads soon. They leave the L2 cache first.
__device__ __forceinline__ void copy_bytes_once(u32 to, const void* from, u32 barrier, u32 bytes) {
    asm volatile(
        "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %3, "
        "[%2], "
        "policy;\n}" ::"r"(to),
        "l"(from), "r"(barrier), "r"(bytes)
        : "memory");
}

// Returns the WGMMA descriptor of a swizzled tile in shared memory. The tile has lines of 128
// bytes; eight lines form a block of 1,024 bytes. `next` is the distance in bytes between tiles of
// 64 values. It matters only if the lines of the tile run along K, as for the values of attention.
__device__ __forceinline__ u64 descriptor(u32 address, u32 next = 16) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | (static_cast<u64>(next >> 4) << 16) | (64ull << 32) |
           (1ull << 62);
}

// Keeps the compiler from moving or reusing registers that a running WGMMA matmul reads or writes.
template <int COUNT>
__device__ __forceinline__ void hold(float (&values)[COUNT]) {
#pragma unroll
    for (int index = 0; index < COUNT; ++index) asm volatile("" : "+f"(values[index])::"memory");
}

template <int COUNT>
__device__ __forceinline__ void hold(u32 (&values)[COUNT]) {
#pragma unroll
    for (int index = 0; index < COUNT; ++index) asm volatile("" : "+r"(values[index])::"memory");
}

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ u32 packed(float low, float high) {
    u32 both;
    asm("cvt.rn." IN "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ u32 packed_f16(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// word & mask | others, in one instruction. The compiler makes two of it if both are constants.
__device__ __forceinline__ u32 masked_or(u32 word, u32 mask, u32 others) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(others));
    return result;
}

// Converts a pair of inputs.
__device__ __forceinline__ void unpack(u32 both, float& low, float& high) {
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32." IN " %0, a;\ncvt.f32." IN " %1, b;\n}"
        : "=f"(low), "=f"(high)
        : "r"(both));
}

__device__ __forceinline__ float unpack_f16(u16 half) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
}

// Converts four float8 numbers to two pairs of float16 numbers.
__device__ __forceinline__ void unpack_fp8(u32 four, u32& low, u32& high) {
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
        : "=r"(low), "=r"(high)
        : "r"(four));
}

// Multiplies a 16 x 16 by a 16 x 8 matrix of float16 numbers, as one warp, and adds it to y.
__device__ __forceinline__ void multiply_add(float (&y)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(y[0]), "+f"(y[1]), "+f"(y[2]), "+f"(y[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same for matrices of the inputs' type.
__device__ __forceinline__ void multiply_add_inputs(float (&y)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." IN "." IN
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(y[0]), "+f"(y[1]), "+f"(y[2]), "+f"(y[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 matrix of 16-bit values. Lane i of a warp has two neighbours of line i / 4.
__device__ __forceinline__ u32 transposed(u32 pair) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_of(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Exchanges values between four lanes. Before the exchange, each lane holds two neighbouring values
// of each of four blocks of eight values. After it, each lane holds one whole block.
__device__ __forceinline__ uint4 transposed(u32 a, u32 b, u32 c, u32 d, int lane) {
    bool odd = lane & 1, upper = lane & 2;
    u32 t0 = __shfl_xor_sync(~0u, odd ? a : b, 1), t1 = __shfl_xor_sync(~0u, odd ? c : d, 1);
    u32 a1 = odd ? t0 : a, b1 = odd ? b : t0, c1 = odd ? t1 : c, d1 = odd ? d : t1;
    u32 t2 = __shfl_xor_sync(~0u, upper ? a1 : c1, 2), t3 = __shfl_xor_sync(~0u, upper ? b1 : d1, 2);
    u32 a2 = upper ? t2 : a1, b2 = upper ? t3 : b1, c2 = upper ? c1 : t2, d2 = upper ? d1 : t3;
    return make_uint4(a2, b2, c2, d2);
}
