#include "executor/numa.h"

#include <cstring>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace engine {

Block copy_by_node(ThreadPool& pool, const Matrix& matrix, int panels) {
    const size_t stride = matrix.stride();
    Block copy(size_t(panels) * stride);
    pool.run([&](int thread) {
        const size_t begin = size_t(int64_t(panels) * thread / pool.size()) * stride;
        const size_t end = size_t(int64_t(panels) * (thread + 1) / pool.size()) * stride;
        memcpy(copy.data() + begin, matrix.data + begin, end - begin);
    });
    return copy;
}

void interleave(const Block& block, const std::vector<int>& nodes) {
    if (nodes.empty()) return;
#if defined(__linux__)
    constexpr int kInterleave = 3, kWordBits = 64, kMaxNodes = 1024;
    uint64_t mask[kMaxNodes / kWordBits] = {};
    for (int node : nodes)
        if (node >= 0 && node < kMaxNodes) mask[node / kWordBits] |= uint64_t(1) << node % kWordBits;
    syscall(SYS_mbind, block.data(), block.size(), kInterleave, mask, kMaxNodes, 0);
#endif
}

}  // namespace engine
