#include "pool.h"

#include <chrono>
#include <sched.h>
#include <system_error>

namespace swarm {
namespace {

constexpr auto WORKER_SPIN = std::chrono::microseconds(60);  // regions of one step follow each other within this
constexpr int PAUSES_A_LOOK = 16;                            // pauses between two looks at the clock
constexpr int CALLER_SPINS = 2000;                           // then yields: the worker may need this very core

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

uint32_t unclaimed(uint64_t ticket) { return (uint32_t)ticket; }

}  // namespace

Pool::Pool(int threads) : asked_(threads) {
  workers_.reserve(threads);
  try {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { serve(i); });
  } catch (const std::system_error&) {  // the system has no more threads: go on with those there are
  }
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run_region(int64_t items, Call call, const void* context) {
  call_ = call;
  context_ = context;
  unfinished_.store(items, std::memory_order_relaxed);
  const uint64_t region = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  ticket_.store(region << 32 | (uint64_t)items);  // sequentially consistent with the look at the sleepers
  if (sleepers_.load() > 0) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  while (claim_one(0)) {
  }
  for (int spins = 0; unfinished_.load(std::memory_order_acquire) > 0; spins++)
    spins < CALLER_SPINS ? pause() : (void)sched_yield();
}

bool Pool::claim_one(int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (unclaimed(ticket) > 0) {
    if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire))
      continue;
    // The region cannot end, nor its function change, before this item is done.
    call_(context_, (int64_t)unclaimed(ticket) - 1, thread);
    unfinished_.fetch_sub(1, std::memory_order_release);
    return true;
  }
  return false;
}

void Pool::serve(int thread) {
  for (;;) {
    while (claim_one(thread)) {
    }
    if (!await_region()) return;
  }
}

// Until there is something to claim; false when the pool ends.
bool Pool::await_region() {
  const auto give_up = std::chrono::steady_clock::now() + WORKER_SPIN;
  do {
    for (int i = 0; i < PAUSES_A_LOOK; i++) {
      if (unclaimed(ticket_.load(std::memory_order_acquire)) > 0) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < give_up && !stop_.load(std::memory_order_relaxed));
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, [&] { return stop_.load() || unclaimed(ticket_.load()) > 0; });
  sleepers_.fetch_sub(1);
  return !stop_.load();
}

}  // namespace swarm
