// `Block`: page-aligned zeroed memory from mmap. The operating system commits a page when it is first
// touched. Large blocks begin at a huge page, so that the first bytes of a block commit no more than it.
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
        const bool is_large = bytes_ >= kHugeFrom;
        mapped_bytes_ = bytes_ + (is_large ? kHugePage : 0);
        void* mapped =
            mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) throw std::bad_alloc();
        mapped_ = data_ = static_cast<uint8_t*>(mapped);
        if (is_large) data_ += round_up_size(uintptr_t(mapped_), kHugePage) - uintptr_t(mapped_);
#if defined(MADV_HUGEPAGE)
        // Huge pages reduce TLB misses. Without them, attention touches a different page for every
        // tile of the KV cache.
        if (is_large) madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
    }
    Block(Block&& other) noexcept { *this = std::move(other); }
    Block& operator=(Block&& other) noexcept {
        std::swap(mapped_, other.mapped_);
        std::swap(mapped_bytes_, other.mapped_bytes_);
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Block() {
        if (mapped_) munmap(mapped_, mapped_bytes_);
    }
    uint8_t* data() const { return data_; }
    float* floats() const { return reinterpret_cast<float*>(data_); }
    size_t size() const { return bytes_; }

  private:
    static constexpr size_t kHugePage = size_t(2) << 20, kHugeFrom = size_t(32) << 20;

    uint8_t* mapped_ = nullptr;
    size_t mapped_bytes_ = 0;
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace engine
