// A thread pool that runs one function on all threads at the same time.
//
// While a thread waits for a job or at a barrier, it spins for some microseconds, then sleeps. An idle engine
// therefore uses no CPU time, and a thread with a long wait leaves its core to the server process.
#pragma once
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "base/common.h"

namespace engine {

// Where the threads of a pool run. Threads that run anywhere have no CPUs. Threads of a node have neighbouring
// numbers. `nodes` is empty if the machine has one node.
struct Placement {
    std::vector<std::vector<int>> cpus;  // the CPU numbers that each thread is bound to; empty: not bound
    std::vector<int> nodes;              // the NUMA node of each thread
};

class ThreadPool {
  public:
    // Starts threads - 1 threads, because the thread that calls `run` works as thread 0.
    ThreadPool(int threads, const Placement& placement);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;

    int size() const { return size_; }
    const std::vector<int>& nodes() const { return nodes_; }
    // Runs `job(thread)` on all threads and returns when all of them are done. A job must not call `run`.
    void run(const std::function<void(int)>& job);
    // Every thread of a job must call `barrier` with its number. It returns when all threads have called it.
    void barrier(int thread);

  private:
    // Threads arrive at a barrier in groups of neighbours, so that few threads write the same cache line. The
    // last thread of a group arrives for the group.
    static constexpr int kGroupThreads = 8;
    struct alignas(128) Group {
        std::atomic<uint32_t> arrived{0};
    };

    void work(int thread);
    void stop();

    int size_;
    std::vector<int> nodes_;
    std::vector<Group> groups_;
    std::vector<std::thread> threads_;
    const std::function<void(int)>* job_ = nullptr;
    alignas(128) std::atomic<uint32_t> generation_{0};
    alignas(128) std::atomic<uint32_t> arrived_{0};  // groups that arrived at the barrier
    alignas(128) std::atomic<uint32_t> phase_{0};
    alignas(128) std::atomic<uint32_t> sleepers_{0};
    std::atomic<bool> stopping_{false};
};

// A queue of the indices [0, count) with work stealing. At first, each thread has an equal share of
// the indices. A thread claims ranges of `grain` indices from its own share, then from the shares
// of other threads, those of its own NUMA node first.
class WorkQueue {
  public:
    WorkQueue(int threads, const std::vector<int>& nodes);
    // Refills the queue. One thread calls it, before the barrier that starts the work.
    void reset(int count, int grain);
    // Claims a range of indices [begin, end) for thread `thread`. Returns false if all indices are
    // claimed.
    bool take(int thread, int& begin, int& end);

  private:
    struct alignas(128) Share {
        std::atomic<int> next{0};
        int end = 0;
        int first_neighbour = 0, neighbours = 0;  // the threads of the same node
    };
    std::vector<Share> shares_;
    int grain_ = 1;
};

}  // namespace engine
