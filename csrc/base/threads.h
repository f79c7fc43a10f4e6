// A few threads that run one function together, again and again.
//
// Between jobs, and at barriers, a thread spins for microseconds and then sleeps, so that an idle engine
// takes no CPU and a busy one shares its cores with the server that feeds it.
#pragma once
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "base/common.h"

namespace engine {

class ThreadPool {
  public:
    // The caller is thread 0; `cpus` (one per thread, or empty) pins all of them.
    ThreadPool(int threads, const std::vector<int>& cpus);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;

    int size() const { return size_; }
    // Runs `job(thread)` on all threads and returns when all are done. Not reentrant.
    void run(const std::function<void(int)>& job);
    // To be called by every thread of a job: none goes on before all have come.
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

// Hands out [0, count) in pieces: each thread takes from a share of its own, then from the others'.
class WorkQueue {
  public:
    explicit WorkQueue(int threads) : shares_(size_t(threads)) {}
    // By one thread, before the barrier that starts the work.
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
