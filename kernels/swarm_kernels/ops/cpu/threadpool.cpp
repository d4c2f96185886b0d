#include "threadpool.h"

#include <chrono>
#include <pthread.h>
#include <sched.h>
#include <system_error>

namespace swarm {
namespace {

constexpr auto WORKER_SPIN = std::chrono::microseconds(60);  // regions of one step follow each other within this
constexpr int PAUSES_A_LOOK = 16;                            // pauses between two looks at the clock
constexpr int CALLER_SPINS = 2000;                           // then it yields, since the worker may need this core

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

uint32_t unclaimed(uint64_t ticket) { return (uint32_t)ticket; }

// Best effort: if it fails, the system schedules the thread.
void set_affinity(std::thread& thread, const std::vector<int>& cores) {
#if defined(__linux__)
  if (cores.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int core : cores)
    if (core >= 0 && core < CPU_SETSIZE) CPU_SET(core, &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
#else
  (void)thread, (void)cores;
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads, const CoreGroups& units)
    : requested_threads_(threads), first_slow_(threads - units.slow_threads) {
  workers_.reserve(threads);
  try {
    for (int i = 1; i < threads; i++) {
      workers_.emplace_back([this, i] { serve(i); });
      set_affinity(workers_.back(), units.cores[i >= first_slow_]);
    }
  } catch (const std::system_error&) {  // the system has no more threads: go on with those there are
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_region(int64_t fast, int64_t slow, Call call, const void* context) {
  call_ = call;
  context_ = context;
  unfinished_.store(fast + slow, std::memory_order_relaxed);
  fast_is_shared_.store(slow == 0, std::memory_order_relaxed);
  queues_[1].first = fast;
  const uint64_t region = (queues_[0].ticket.load(std::memory_order_relaxed) >> 32) + 1;
  queues_[1].ticket.store(region << 32 | (uint64_t)slow);
  queues_[0].ticket.store(region << 32 | (uint64_t)fast);  // sequentially consistent with the look at the sleepers
  if (sleepers_.load() > 0) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  while (claim_one(0)) {
  }
  for (int spins = 0; unfinished_.load(std::memory_order_acquire) > 0; spins++)
    spins < CALLER_SPINS ? pause() : (void)sched_yield();
}

// A slow thread that sees `shared_` of another region takes an item it was not meant to have, which harms nobody.
bool ThreadPool::claim_one(int thread) {
  if (thread < first_slow_) return claim_from(queues_[0], thread);
  return claim_from(queues_[1], thread) ||
         (fast_is_shared_.load(std::memory_order_relaxed) && claim_from(queues_[0], thread));
}

bool ThreadPool::anything_for(int thread) const {
  if (thread >= first_slow_ && unclaimed(queues_[1].ticket.load()) > 0) return true;
  return (thread < first_slow_ || fast_is_shared_.load()) && unclaimed(queues_[0].ticket.load()) > 0;
}

bool ThreadPool::claim_from(Queue& queue, int thread) {
  uint64_t ticket = queue.ticket.load(std::memory_order_acquire);
  while (unclaimed(ticket) > 0) {
    if (!queue.ticket.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire))
      continue;
    // The region cannot end, nor its function change, before this item is done.
    call_(context_, queue.first + (int64_t)unclaimed(ticket) - 1, thread);
    unfinished_.fetch_sub(1, std::memory_order_release);
    return true;
  }
  return false;
}

void ThreadPool::serve(int thread) {
  for (;;) {
    while (claim_one(thread)) {
    }
    if (!await_region(thread)) return;
  }
}

// Until there is something to claim; false when the pool ends.
bool ThreadPool::await_region(int thread) {
  const auto give_up = std::chrono::steady_clock::now() + WORKER_SPIN;
  do {
    for (int i = 0; i < PAUSES_A_LOOK; i++) {
      if (anything_for(thread)) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < give_up && !stop_.load(std::memory_order_relaxed));
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, [&] { return stop_.load() || anything_for(thread); });
  sleepers_.fetch_sub(1);
  return !stop_.load();
}

}  // namespace swarm
