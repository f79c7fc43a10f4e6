#include "base/threads.h"

#include <algorithm>
#include <chrono>
#include <system_error>

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace engine {
namespace {

constexpr auto kSpin = std::chrono::microseconds(60);
constexpr int kSpinsPerLook = 64;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#if defined(__linux__)
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

void bind_to(const std::vector<int>& cpus) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int cpu : cpus) CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}
#else
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    if (word.load() == value) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

void wake_all(std::atomic<uint32_t>&) {}
void bind_to(const std::vector<int>&) {}
#endif

// Waits until `word` differs from `value`. The thread spins first, then sleeps. While it sleeps, it
// is counted in `sleepers`. The thread that changes `word` reads this count to know whether it must
// wake others.
void wait_while(std::atomic<uint32_t>& word, uint32_t value, std::atomic<uint32_t>& sleepers) {
    auto deadline = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < kSpinsPerLook; i++) {
            if (word.load(std::memory_order_acquire) != value) return;
            relax();
        }
    } while (std::chrono::steady_clock::now() < deadline);
    sleepers.fetch_add(1);
    while (word.load() == value) sleep_while(word, value);
    sleepers.fetch_sub(1);
}

}  // namespace

ThreadPool::ThreadPool(int threads, const Placement& placement)
    : size_(threads), nodes_(placement.nodes), groups_(size_t(div_up(threads, kGroupThreads))) {
    const bool is_bound = !placement.cpus.empty();
    if (is_bound) bind_to(placement.cpus.at(0));
    try {
        for (int thread = 1; thread < size_; thread++) {
            std::vector<int> cpus = is_bound ? placement.cpus.at(size_t(thread)) : std::vector<int>();
            threads_.emplace_back([this, thread, cpus] {
                if (!cpus.empty()) bind_to(cpus);
                work(thread);
            });
        }
    } catch (const std::system_error&) {  // the operating system refused to start another thread
        stop();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    stop();
}

void ThreadPool::stop() {
    stopping_ = true;
    generation_.fetch_add(1);
    wake_all(generation_);
    for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(const std::function<void(int)>& job) {
    if (size_ == 1) return job(0);
    job_ = &job;
    generation_.fetch_add(1);
    if (sleepers_.load() != 0) wake_all(generation_);
    job(0);
    barrier(0);
}

void ThreadPool::work(int thread) {
    for (uint32_t seen = 0;; seen++) {
        wait_while(generation_, seen, sleepers_);
        if (stopping_) return;
        (*job_)(thread);
        barrier(thread);
    }
}

void ThreadPool::barrier(int thread) {
    if (size_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    auto is_last = [](std::atomic<uint32_t>& arrived, int expected) {
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 != uint32_t(expected)) return false;
        arrived.store(0, std::memory_order_relaxed);
        return true;
    };
    const int group = thread / kGroupThreads;
    const int members = std::min(kGroupThreads, size_ - group * kGroupThreads);
    if (is_last(groups_[size_t(group)].arrived, members) && is_last(arrived_, int(groups_.size()))) {
        phase_.store(phase + 1);
        if (sleepers_.load() != 0) wake_all(phase_);
    } else {
        wait_while(phase_, phase, sleepers_);
    }
}

WorkQueue::WorkQueue(int threads, const std::vector<int>& nodes) : shares_(size_t(threads)) {
    for (int thread = 0; thread < threads; thread++) {
        int first = nodes.empty() ? 0 : thread, last = nodes.empty() ? threads : thread + 1;
        while (first > 0 && nodes[size_t(first) - 1] == nodes[size_t(thread)]) first--;
        while (last < threads && nodes[size_t(last)] == nodes[size_t(thread)]) last++;
        shares_[size_t(thread)].first_neighbour = first;
        shares_[size_t(thread)].neighbours = last - first;
    }
}

void WorkQueue::reset(int count, int grain) {
    int threads = int(shares_.size()), pieces = div_up(count, grain);
    for (int thread = 0; thread < threads; thread++) {
        Share& share = shares_[size_t(thread)];
        share.end = std::min(count, int(int64_t(pieces) * (thread + 1) / threads) * grain);
        share.next.store(int(int64_t(pieces) * thread / threads) * grain, std::memory_order_relaxed);
    }
    grain_ = grain;
}

bool WorkQueue::take(int thread, int& begin, int& end) {
    const int threads = int(shares_.size());
    const int first = shares_[size_t(thread)].first_neighbour, near = shares_[size_t(thread)].neighbours;
    for (int i = 0; i < threads; i++) {
        const int other = i < near ? first + (thread - first + i) % near : (first + i) % threads;
        Share& share = shares_[size_t(other)];
        if (share.next.load(std::memory_order_relaxed) >= share.end) continue;
        begin = share.next.fetch_add(grain_, std::memory_order_relaxed);
        if (begin >= share.end) continue;
        end = std::min(begin + grain_, share.end);
        return true;
    }
    return false;
}

}  // namespace engine
