#include "pool.h"

#include <pthread.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

namespace rq {

namespace {

class Pool {
 public:
  // False, having done nothing, where another thread is using the pool.
  bool run(int64_t count, int threads, const std::function<void(int64_t)>& body) {
    std::unique_lock<std::mutex> owner(busy_, std::try_to_lock);
    if (!owner) return false;
    grow(threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = &body;
      count_ = count;
      next_ = 0;
      open_seats_ = threads - 1 < workers_ ? threads - 1 : workers_;
      round_++;
    }
    start_.notify_all();
    work(body, count);
    std::unique_lock<std::mutex> lock(mutex_);
    open_seats_ = 0;  // late wakers find nothing
    done_.wait(lock, [this] { return seated_ == 0; });
    body_ = nullptr;
    if (std::exception_ptr failure = std::exchange(failure_, nullptr)) std::rethrow_exception(failure);
    return true;
  }

 private:
  void grow(int wanted) {
    while (workers_ < wanted) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        return;  // fewer workers, same result
      }
      workers_++;
    }
  }

  void work(const std::function<void(int64_t)>& body, int64_t count) {
    try {
      for (int64_t i; (i = next_.fetch_add(1)) < count;) body(i);
    } catch (...) {
      next_ = count;
      std::lock_guard<std::mutex> lock(mutex_);
      failure_ = std::current_exception();
    }
  }

  void serve() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      start_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (open_seats_ == 0) continue;
      open_seats_--;
      seated_++;
      const std::function<void(int64_t)>& body = *body_;
      const int64_t count = count_;
      lock.unlock();
      work(body, count);
      lock.lock();
      if (--seated_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_;  // held by the loop in progress
  std::mutex mutex_;
  std::condition_variable start_, done_;
  const std::function<void(int64_t)>* body_ = nullptr;
  std::exception_ptr failure_;
  std::atomic<int64_t> next_{0};
  int64_t count_ = 0;
  uint64_t round_ = 0;
  int open_seats_ = 0, seated_ = 0, workers_ = 0;
};

// Never destroyed: its workers wait in it until the process ends.
std::atomic<Pool*> current{nullptr};
std::atomic<Parallel> borrowed{nullptr};

// A child of fork has the memory of all threads but none of them, and perhaps a locked mutex: it forgets them.
void forget_threads_in_children() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    current.store(nullptr);
    borrowed.store(nullptr);
  });
  (void)registered;
}

Pool& pool() {
  if (Pool* existing = current.load()) return *existing;
  forget_threads_in_children();
  Pool* made = new Pool;
  Pool* expected = nullptr;
  if (current.compare_exchange_strong(expected, made)) return *made;
  delete made;
  return *expected;
}

using Clock = std::chrono::steady_clock;

// Loops for which borrowed threads are left alone after one of them kept the caller waiting for longer than it worked
// itself: the machine is crowded, and such a loop returns only when all of its threads have been awake.
constexpr int kLoopsApart = 256;
constexpr Clock::duration kPatience = std::chrono::microseconds(50);
std::atomic<int> loops_apart{0};

// One loop on borrowed threads, each of which takes indices until there are none.
struct Loop {
  Loop(const std::function<void(int64_t)>& body_, int64_t count_)
      : body(body_), count(count_), caller(std::this_thread::get_id()) {}

  const std::function<void(int64_t)>& body;
  const int64_t count;
  std::atomic<int64_t> next{0};
  const std::thread::id caller;
  Clock::time_point done;  // when the caller found no index left
  std::mutex mutex;
  std::exception_ptr failure;

  static void work(void* self) {
    Loop& loop = *static_cast<Loop*>(self);
    try {
      for (int64_t i; (i = loop.next.fetch_add(1)) < loop.count;) loop.body(i);
    } catch (...) {
      loop.next = loop.count;
      std::lock_guard<std::mutex> lock(loop.mutex);
      loop.failure = std::current_exception();
    }
    if (std::this_thread::get_id() == loop.caller) loop.done = Clock::now();
  }

  void run(Parallel parallel, int threads) {
    const Clock::time_point start = Clock::now();
    parallel(&Loop::work, this, static_cast<unsigned>(threads), 0);
    if (Clock::now() - done > done - start + kPatience) loops_apart = kLoopsApart;
    if (failure) std::rethrow_exception(failure);
  }
};

struct Scratch {
  char* data = nullptr;
  int64_t size = 0;
  ~Scratch() { std::free(data); }
};

}  // namespace

void borrow_threads(Parallel parallel) {
  forget_threads_in_children();
  borrowed.store(parallel);
}

void parallel_for(int64_t count, int threads, const std::function<void(int64_t)>& body) {
  const int useful = count < threads ? static_cast<int>(count) : threads;
  if (useful > 1) {
    if (loops_apart > 0) {
      loops_apart--;
    } else if (const Parallel parallel = borrowed.load()) {
      return Loop(body, count).run(parallel, useful);
    }
    if (pool().run(count, useful, body)) return;
  }
  for (int64_t i = 0; i < count; i++) body(i);
}

char* thread_scratch(int64_t bytes) {
  thread_local Scratch scratch;
  if (scratch.size < bytes) {
    std::free(scratch.data);
    scratch.size = 0;
    const size_t size = static_cast<size_t>((bytes + 63) / 64 * 64);
    scratch.data = static_cast<char*>(std::aligned_alloc(64, size));
    if (!scratch.data) throw std::bad_alloc();
    scratch.size = static_cast<int64_t>(size);
  }
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(scratch.data, static_cast<size_t>(scratch.size));  // red zones of the last use (tile.h)
#endif
  return scratch.data;
}

}  // namespace rq
