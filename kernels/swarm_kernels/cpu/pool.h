// A small pool of threads for regions of a few microseconds. The caller works too; idle workers spin briefly, then
// sleep, so a region that follows soon needs no system call to start, and an idle process costs nothing.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace swarm {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int asked() const { return asked_; }
  int threads() const { return (int)workers_.size() + 1; }  // fewer than asked if the system gave no more

  // Calls work(item, thread) once for each item, from the caller and the workers, highest item first; thread is below
  // threads(). Returns when all are done. One region at a time.
  template <typename Work>
  void run(int64_t items, const Work& work) {
    if (items <= 1 || workers_.empty()) {
      for (int64_t item = items; item-- > 0;) work(item, 0);
      return;
    }
    run_region(items, [](const void* context, int64_t item, int thread) {
      (*static_cast<const Work*>(context))(item, thread);
    }, &work);
  }

 private:
  using Call = void (*)(const void*, int64_t, int);

  void run_region(int64_t items, Call call, const void* context);
  bool claim_one(int thread);
  void serve(int thread);
  bool await_region();

  const int asked_;
  std::vector<std::thread> workers_;
  // Upper half: the region's number; lower half: its items not yet claimed. Claiming is a compare-and-swap of both, so
  // a worker that comes late can never take an item of one region with the function of another.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) Call call_ = nullptr;
  const void* context_ = nullptr;
  std::atomic<bool> stop_{false};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace swarm
