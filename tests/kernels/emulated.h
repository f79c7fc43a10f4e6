// Runs a CUDA kernel on a CPU: what `hopper.cuh` and CUDA give a kernel, without a GPU. A thread of the
// kernel is a fiber. Threads change places only where a kernel communicates: at barriers, and in functions
// of a whole warp. Thread blocks run one after the other. A copy to shared memory first fills its target with
// NaN and is done some time later, so that a kernel which does not wait for it computes NaN.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using std::max;
using std::min;

struct uint4 {
    u32 x, y, z, w;
};
struct uint2 {
    u32 x, y;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};

constexpr int MAX_SHARED_BYTES = 232448, STACK_BYTES = 1 << 16;
extern "C" {
alignas(128) uint4 shared[MAX_SHARED_BYTES / 16];
}

struct Warp {
    u32 given[2][32][12];  // operands of two calls: a lane may be one call ahead
    int arrived = 0, calls = 0;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK_BYTES);
    bool done = false;
    int calls = 0;
};

struct Copy {
    u32 to, barrier, bytes;
    const void* from;
    int delay;
};

struct Index {
    u32 x;
};
Index threadIdx, blockIdx;
ucontext_t scheduler;
std::vector<Fiber>* fibers;
std::vector<Warp> warps;
std::deque<Copy> copies;
int num_threads, block_arrived, block_calls, num_exited;
int part_arrived, part_calls;  // of the barrier that only some threads of the block wait at
bool progress;

inline void give_way() {
    swapcontext(&(*fibers)[threadIdx.x].context, &scheduler);
}

inline Warp& own_warp() {
    return warps[threadIdx.x / 32];
}

// Gives operands to the other lanes of the warp, and returns those of all lanes.
inline u32 (*exchange(const u32* operands, int count))[12] {
    Warp& warp = own_warp();
    int call = (*fibers)[threadIdx.x].calls++;
    u32(*place)[12] = warp.given[call % 2];
    std::copy(operands, operands + count, place[threadIdx.x % 32]);
    if (++warp.arrived == 32) warp.arrived = 0, ++warp.calls;
    while (warp.calls <= call) give_way();
    progress = true;
    return place;
}

inline u32 bits(float x) {
    u32 word;
    std::memcpy(&word, &x, 4);
    return word;
}

inline float __uint_as_float(u32 word) {
    float x;
    std::memcpy(&x, &word, 4);
    return x;
}

// g++ has C++'s _Float16 on ARM from version 13 on; __fp16 stores the same bits.
#ifdef __aarch64__
using Half = __fp16;
#else
using Half = _Float16;
#endif

inline float from_f16(u16 half) {
    Half x;
    std::memcpy(&x, &half, 2);
    return static_cast<float>(x);
}

inline u16 to_f16(float x) {
    Half half = static_cast<Half>(x);
    u16 word;
    std::memcpy(&word, &half, 2);
    return word;
}

inline u16 to_bf16(float x) {
    u32 word = bits(x);
    if (std::isnan(x)) return 0x7fc0;
    return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

inline u32 packed_f16(float low, float high) {
    return to_f16(low) | static_cast<u32>(to_f16(high)) << 16;
}

inline u32 packed(float low, float high) {
    if (!IS_BF16) return packed_f16(low, high);
    return to_bf16(low) | static_cast<u32>(to_bf16(high)) << 16;
}

inline u16 fp8_to_f16(u32 byte) {
    int exponent = byte >> 3 & 15, fraction = byte & 7;
    float x = exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp(1.0f * fraction, -9);
    if ((byte & 0x7f) == 0x7f) x = NAN;
    return to_f16(byte & 0x80 ? -x : x);
}

inline void unpack_fp8(u32 four, u32& low, u32& high) {
    low = fp8_to_f16(four & 0xff) | static_cast<u32>(fp8_to_f16(four >> 8 & 0xff)) << 16;
    high = fp8_to_f16(four >> 16 & 0xff) | static_cast<u32>(fp8_to_f16(four >> 24)) << 16;
}

inline float from_f16_pair(u32 pair, int index) {
    return from_f16(index ? pair >> 16 : pair & 0xffff);
}

// One of a pair of inputs.
inline float input_of(u32 pair, int index) {
    if (!IS_BF16) return from_f16_pair(pair, index);
    return __uint_as_float(index ? pair & 0xffff0000u : pair << 16);
}

inline void unpack(u32 both, float& low, float& high) {
    low = input_of(both, 0), high = input_of(both, 1);
}

inline u32 masked_or(u32 word, u32 mask, u32 others) {
    return word & mask | others;
}

inline float unpack_f16(u16 half) {
    return from_f16(half);
}

// PTX's fragments of m16n8k16: lane i has lines i / 4 and i / 4 + 8 of the left matrix and of the sums, and
// column i / 4 of the right matrix. i % 4 says which pairs of neighbours it has.
inline void multiply_add(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1, float (*value)(u32, int)) {
    u32 operands[6] = {a[0], a[1], a[2], a[3], b0, b1};
    auto given = exchange(operands, 6);
    int lane = threadIdx.x % 32;
    for (int index = 0; index < 4; ++index) {
        int line = lane / 4, half = index / 2, column = lane % 4 * 2 + index % 2;
        for (int k = 0; k < 16; ++k) {
            float left = value(given[line * 4 + k % 8 / 2][half + k / 8 * 2], k % 2);
            float right = value(given[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
            sums[index] += left * right;
        }
    }
}

inline void multiply_add(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    multiply_add(sums, a, b0, b1, from_f16_pair);
}

inline void multiply_add_inputs(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    multiply_add(sums, a, b0, b1, input_of);
}

inline u32 transposed(u32 pair) {
    auto given = exchange(&pair, 1);
    int lane = threadIdx.x % 32, line = lane / 4, first = lane % 4 * 2;
    auto at = [&](int i, int j) { return given[i * 4 + j / 2][0] >> (j % 2 * 16) & 0xffff; };
    return at(first, line) | at(first + 1, line) << 16;
}

inline int __shfl_sync(u32, int x, int from) {
    u32 word = x;
    return exchange(&word, 1)[from % 32][0];
}

inline float __shfl_xor_sync(u32, float x, int step) {
    u32 word = bits(x);
    return __uint_as_float(exchange(&word, 1)[(threadIdx.x % 32) ^ step][0]);
}

inline bool __any_sync(u32, bool x) {
    u32 word = x;
    auto given = exchange(&word, 1);
    return std::any_of(given, given + 32, [](const u32(&lane)[12]) { return lane[0]; });
}

inline void __syncwarp() {
    u32 nothing = 0;
    exchange(&nothing, 1);
}

inline void __syncthreads() {
    int call = block_calls;
    if (++block_arrived + num_exited == num_threads) block_arrived = 0, ++block_calls;
    while (block_calls == call) give_way();
    progress = true;
}

inline void sync_threads(int count) {
    int call = part_calls;
    if (++part_arrived == count) part_arrived = 0, ++part_calls;
    while (part_calls == call) give_way();
    progress = true;
}

inline void __threadfence() {}

inline int atomicAdd(int* place, int x) {
    int before = *place;
    *place += x;
    return before;
}

template <typename T>
T __ldcg(const T* from) {
    return *from;
}

inline u32 __byte_perm(u32 x, u32 y, u32 order) {
    u64 both = static_cast<u64>(y) << 32 | x;
    u32 result = 0;
    for (int index = 0; index < 4; ++index) {
        result |= static_cast<u32>(both >> 8 * (order >> 4 * index & 7) & 0xff) << 8 * index;
    }
    return result;
}

inline float exp2_of(float x) {
    return std::exp2(x);
}
inline float rsqrtf(float x) {
    return 1.0f / std::sqrt(x);
}
inline float log2_of(float x) {
    return std::log2(x);
}

inline char* shared_bytes(u32 address) {
    return reinterpret_cast<char*>(shared) + address;
}

inline u32 shared_address(const void* pointer) {
    return static_cast<const char*>(pointer) - reinterpret_cast<char*>(shared);
}

struct Barrier {  // 8 bytes, as on a GPU
    int16_t expected, pending;
    int32_t phase_and_bytes;  // bit 0: the parity of the phase; above: bytes that have not arrived
};

inline Barrier& barrier_at(u32 address) {
    return *reinterpret_cast<Barrier*>(shared_bytes(address));
}

inline void init_barrier(u32 address, u32 count) {
    barrier_at(address) = {static_cast<int16_t>(count), static_cast<int16_t>(count), 0};
}

inline void change(u32 address, int arrivals, int bytes) {
    Barrier& barrier = barrier_at(address);
    barrier.pending -= arrivals;
    barrier.phase_and_bytes += 2 * bytes;
    if (barrier.pending == 0 && barrier.phase_and_bytes >> 1 == 0) {
        barrier.pending = barrier.expected;
        barrier.phase_and_bytes ^= 1;
    }
    progress = true;
}

inline void publish_barriers() {}
inline void wait_for_previous() {}
inline void launch_dependents() {}
inline void arrive(u32 barrier) {
    change(barrier, 1, 0);
}
inline void expect_bytes(u32 barrier, u32 bytes) {
    change(barrier, 1, bytes);
}

inline void wait_barrier(u32 barrier, u32 parity) {
    while ((barrier_at(barrier).phase_and_bytes & 1) == static_cast<int>(parity)) give_way();
    progress = true;
}

inline void copy_bytes(u32 to, const void* from, u32 barrier, u32 bytes) {
    bool is_aligned = to % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0 && bytes % 16 == 0;
    if (!is_aligned) std::fprintf(stderr, "a bulk copy is not aligned\n"), std::abort();
    std::memset(shared_bytes(to), 0xff, bytes);
    copies.push_back({to, barrier, bytes, from, std::rand() % 4});
}

inline void copy_bytes_once(u32 to, const void* from, u32 barrier, u32 bytes) {
    copy_bytes(to, from, barrier, bytes);
}

inline void copy_some() {
    for (auto copy = copies.begin(); copy != copies.end();) {
        progress = true;
        if (copy->delay-- > 0) {
            ++copy;
            continue;
        }
        std::memcpy(shared_bytes(copy->to), copy->from, copy->bytes);
        change(copy->barrier, 0, -static_cast<int>(copy->bytes));
        copy = copies.erase(copy);
    }
}

std::function<void()> body;

inline void run_fiber() {
    body();
    (*fibers)[threadIdx.x].done = progress = true;
    // Threads that have exited do not count at barriers of the thread block.
    if (++num_exited + block_arrived == num_threads && block_arrived) block_arrived = 0, ++block_calls;
    give_way();
}

inline void run_block(int threads) {
    std::vector<Fiber> here(threads);
    fibers = &here;
    warps.assign(threads / 32, Warp{});
    num_threads = threads;
    block_arrived = block_calls = num_exited = part_arrived = 0;
    std::memset(shared, 0xff, sizeof(shared));
    for (Fiber& fiber : here) {
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&fiber.context, run_fiber, 0);
    }
    while (num_exited < threads) {
        progress = false;
        for (int thread = 0; thread < threads; ++thread) {
            if (here[thread].done) continue;
            threadIdx.x = thread;
            swapcontext(&scheduler, &here[thread].context);
        }
        copy_some();
        if (!progress) std::fprintf(stderr, "all threads wait for each other\n"), std::abort();
    }
    if (!copies.empty()) std::fprintf(stderr, "a copy outlives its thread block\n"), std::abort();
}

template <typename... Args, size_t... INDEX>
void run_grid(int blocks, int threads, void (*kernel)(Args...), void** given, std::index_sequence<INDEX...>) {
    body = [=] { kernel(*static_cast<Args*>(given[INDEX])...); };
    for (int block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        run_block(threads);
    }
}

template <typename... Args>
void run_kernel(int blocks, int threads, void (*kernel)(Args...), void** given) {
    run_grid(blocks, threads, kernel, given, std::index_sequence_for<Args...>{});
}
