// A small pool of threads for regions of a few microseconds. The caller works too; idle workers spin briefly, then
// sleep, so a region that follows soon needs no system call to start, and an idle process costs nothing.
//
// The threads may form a fast and a slow group, each pinned to its own cores (Ghidorah's hetero-core model parallelism,
// section III-B). Work is then either shared by all or split beforehand between the groups.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace swarm {

struct CoreGroups {
  int slow_threads = 0;          // the last of the pool's; 0: all are one group
  int64_t slow_permille = 0;  // of the columns of a linear
  std::vector<int> cores[2];       // where the threads of the fast and the slow group run; empty: anywhere
};

class ThreadPool {
 public:
  explicit ThreadPool(int threads, const CoreGroups& units = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int requested_threads() const { return requested_threads_; }
  int threads() const { return (int)workers_.size() + 1; }  // fewer than requested if the system has no more
  bool has_slow_group() const { return threads() > first_slow_; }
  int slow_threads() const { return has_slow_group() ? threads() - first_slow_ : 0; }

  // Calls work(item, thread) once for each item, from the caller and the workers, highest item first; thread is below
  // threads(). Returns when all are done. One region at a time.
  template <typename Work>
  void run(int64_t items, const Work& work) {
    run(items, 0, work);
  }
  // The same; with a slow group, it computes the last `slow` items and, nothing else.
  template <typename Work>
  void run(int64_t items, int64_t slow, const Work& work) {
    if ((items <= 1 && slow == 0) || workers_.empty()) {
      for (int64_t item = items; item-- > 0;) work(item, 0);
      return;
    }
    run_region(items - slow, slow, [](const void* context, int64_t item, int thread) {
      (*static_cast<const Work*>(context))(item, thread);
    }, &work);
  }

 private:
  using Call = void (*)(const void*, int64_t, int);

  // The unclaimed items of one group. Upper half: the region's number; lower half: its items not yet claimed. Claiming
  // is a compare-and-swap of both, so a worker that comes late can never take an item of one region with the function
  // of another.
  struct alignas(64) Queue {
    std::atomic<uint64_t> ticket{0};
    int64_t first = 0;  // item
  };

  void run_region(int64_t fast, int64_t slow, Call call, const void* context);
  bool claim_one(int thread);
  bool claim_from(Queue& queue, int thread);
  bool anything_for(int thread) const;
  void serve(int thread);
  bool await_region(int thread);

  const int requested_threads_, first_slow_;  // thread
  std::vector<std::thread> workers_;
  Queue queues_[2];
  std::atomic<bool> fast_is_shared_{true};  // the slow group takes the fast one's items too
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) Call call_ = nullptr;
  const void* context_ = nullptr;
  std::atomic<bool> stop_{false};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace swarm
