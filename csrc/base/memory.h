// `Block`: page-aligned zeroed memory from mmap. The operating system commits a page when it is first
// touched.
#pragma once
#include <sys/mman.h>

#include <new>
#include <utility>

#include "base/common.h"

namespace engine {

class Block {
  public:
    Block() = default;
    explicit Block(size_t bytes) : bytes_(round_up_size(bytes + 1, 4096)) {
        void* data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<uint8_t*>(data);
#if defined(MADV_HUGEPAGE)
        // Huge pages reduce TLB misses. Without them, attention touches a different page for every
        // tile of the KV cache.
        if (bytes_ >= kHugeFrom) madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
    }
    Block(Block&& other) noexcept { *this = std::move(other); }
    Block& operator=(Block&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Block() {
        if (data_) munmap(data_, bytes_);
    }
    uint8_t* data() const { return data_; }
    float* floats() const { return reinterpret_cast<float*>(data_); }
    size_t size() const { return bytes_; }

  private:
    static constexpr size_t kHugeFrom = size_t(32) << 20;

    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace engine
