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
