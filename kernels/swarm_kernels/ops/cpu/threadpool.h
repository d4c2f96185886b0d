// A small pool of threads for regions of a few microseconds. The caller works too; idle workers spin briefly, then
// sleep, so a region that follows soon needs no system call to start, and an idle process costs nothing.
//
// The threads may form two units, a wide and a narrow one, each on cores of its own (Ghidorah's hetero-core model
// parallelism, section III-B). Work is then either shared by all or divided beforehand between the units.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace swarm {

struct Units {
  int narrow_threads = 0;          // the last of the pool's; 0: all are one unit
  int64_t narrow_thousandths = 0;  // of the columns of a linear
  std::vector<int> cores[2];       // where the threads of the wide and the narrow unit run; empty: anywhere
};

class Pool {
 public:
  explicit Pool(int threads, const Units& units = {});
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int asked() const { return asked_; }
  int threads() const { return (int)workers_.size() + 1; }  // fewer than asked if the system gave no more
  bool divided() const { return threads() > first_narrow_; }
  int narrow_threads() const { return divided() ? threads() - first_narrow_ : 0; }

  // Calls work(item, thread) once for each item, from the caller and the workers, highest item first; thread is below
  // threads(). Returns when all are done. One region at a time.
  template <typename Work>
  void run(int64_t items, const Work& work) {
    run(items, 0, work);
  }
  // The same; the last `narrow` items of a divided pool are the narrow unit's, and only these.
  template <typename Work>
  void run(int64_t items, int64_t narrow, const Work& work) {
    if ((items <= 1 && narrow == 0) || workers_.empty()) {
      for (int64_t item = items; item-- > 0;) work(item, 0);
      return;
    }
    run_region(items - narrow, narrow, [](const void* context, int64_t item, int thread) {
      (*static_cast<const Work*>(context))(item, thread);
    }, &work);
  }

 private:
  using Call = void (*)(const void*, int64_t, int);

  // What is left of one unit's items. Upper half: the region's number; lower half: its items not yet claimed. Claiming
  // is a compare-and-swap of both, so a worker that comes late can never take an item of one region with the function
  // of another.
  struct alignas(64) Queue {
    std::atomic<uint64_t> ticket{0};
    int64_t first = 0;  // item
  };

  void run_region(int64_t wide, int64_t narrow, Call call, const void* context);
  bool claim_one(int thread);
  bool claim_from(Queue& queue, int thread);
  bool anything_for(int thread) const;
  void serve(int thread);
  bool await_region(int thread);

  const int asked_, first_narrow_;  // thread
  std::vector<std::thread> workers_;
  Queue queues_[2];
  std::atomic<bool> shared_{true};  // the narrow unit takes the wide one's items too
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) Call call_ = nullptr;
  const void* context_ = nullptr;
  std::atomic<bool> stop_{false};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace swarm
