// How the threads of a kernel wait for each other.

// A ring of COUNT buffers in shared memory. Consumers wait until a buffer is full. The producer
// waits until a buffer is free.
template <int COUNT, u32 BYTES>
struct Ring {
    u32 buffers, full;
    int stage = 0;
    u32 parity;

    __device__ __forceinline__ Ring(u32 buffers, u32 full, u32 parity)
        : buffers(buffers), full(full), parity(parity) {}
    __device__ __forceinline__ u32 buffer() const { return buffers + stage * BYTES; }
    __device__ __forceinline__ u32 ready() const { return full + 8 * stage; }
    __device__ __forceinline__ u32 free() const { return full + 8 * (COUNT + stage); }
    __device__ __forceinline__ void advance() {
        if (++stage == COUNT) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Whether this warp is the last of `count` to write its partial result. Then it sees all of them. The counter is zero
// again afterwards.
__device__ __forceinline__ bool arrives_last(int* arrived, int count) {
    int lane = threadIdx.x % 32, before = 0;
    __threadfence();
    __syncwarp();
    if (lane == 0) before = atomicAdd(arrived, 1);
    bool is_last = __shfl_sync(~0u, before, 0) == count - 1;
    if (is_last && lane == 0) *arrived = 0;
    __threadfence();
    return is_last;
}
