// A thread pool that runs one function on all threads together.
//
// Between jobs and at barriers a thread spins for some microseconds, then sleeps. An idle engine uses no CPU,
// and a busy one leaves the cores to the server process while it waits.
#pragma once
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "base/common.h"

namespace engine {

class ThreadPool {
  public:
    // The caller is thread 0. `cpus` has one CPU number per thread, or is empty for no pinning.
    ThreadPool(int threads, const std::vector<int>& cpus);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;

    int size() const { return size_; }
    // Runs `job(thread)` on all threads and returns when all are done. Not reentrant.
    void run(const std::function<void(int)>& job);
    // Every thread of a job must call it. It returns when all of them have arrived.
    void barrier();

  private:
    void work(int thread);
    void stop();

    int size_;
    std::vector<std::thread> threads_;
    const std::function<void(int)>* job_ = nullptr;
    alignas(128) std::atomic<uint32_t> generation_{0};
    alignas(128) std::atomic<uint32_t> arrived_{0};
    alignas(128) std::atomic<uint32_t> phase_{0};
    alignas(128) std::atomic<uint32_t> sleepers_{0};
    std::atomic<bool> stopping_{false};
};

// Work stealing over [0, count): a thread claims pieces of `grain` from its own share, then from the others'.
class WorkQueue {
  public:
    explicit WorkQueue(int threads) : shares_(size_t(threads)) {}
    // Called by one thread, before the barrier that starts the work.
    void reset(int count, int grain);
    bool take(int thread, int& begin, int& end);

  private:
    struct alignas(128) Share {
        std::atomic<int> next{0};
        int end = 0;
    };
    std::vector<Share> shares_;
    int grain_ = 1;
};

}  // namespace engine
