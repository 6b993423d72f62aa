#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kIdleSpin = std::chrono::microseconds(60);
constexpr auto kFinishSpin = std::chrono::microseconds(30);

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The word is a 32-bit atomic: the kernel reads it where it lies.
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
void futex_wake(std::atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

template <class Condition>
bool spin_until(Condition done, Clock::duration limit) {
  const Clock::time_point end = Clock::now() + limit;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      relax();
    }
  } while (Clock::now() < end);
  return done();
}

constexpr int kMaxChunks = 0xffff;  // of a job: a share's bounds are 16 bits each

// One thread's chunks of the running job: job number << 32 | begin << 16 | end. Its owner takes them from the front, so
// that it walks through memory in order; a thread without work takes over the back half. The job number keeps late
// threads off a job until all its shares are dealt out: they would put what they take where a share is yet to come.
struct alignas(64) Share {
  std::atomic<uint64_t> range{0};

  static uint32_t begin_of(uint64_t range) { return range >> 16 & 0xffff; }
  static uint32_t end_of(uint64_t range) { return range & 0xffff; }
  static bool has_chunks(uint64_t range, uint32_t job) { return range >> 32 == job && begin_of(range) < end_of(range); }
  static bool has_chunk(uint64_t range, uint32_t job) { return range >> 32 == job && begin_of(range) < end_of(range); }

  // The first chunk of that job, or -1.
  int take(uint32_t job) {
    uint64_t seen = range.load(std::memory_order_acquire);
    while (has_chunk(seen, job)) {
      if (range.compare_exchange_weak(seen, seen + (1u << 16), std::memory_order_acq_rel, std::memory_order_acquire)) {
        return static_cast<int>(begin_of(seen));
      }
    }
    return -1;
  }

  // The back half (of one chunk, all) as a range to put elsewhere; an empty one if there is nothing of that job.
  uint64_t take_half(uint32_t job) {
    uint64_t seen = range.load(std::memory_order_acquire);
    while (has_chunk(seen, job)) {
      const uint32_t middle = begin_of(seen) + (end_of(seen) - begin_of(seen)) / 2;
      const uint64_t front = (seen & ~uint64_t{0xffff}) | middle;
      if (range.compare_exchange_weak(seen, front, std::memory_order_acq_rel, std::memory_order_acquire)) {
        return (seen & ~uint64_t{0xffff0000}) | static_cast<uint64_t>(middle) << 16;
      }
    }
    return 0;
  }
};

// Owns the workers and the one job that runs. A job's fields are written only while no chunk of the previous one is
// claimed and unfinished; a worker reads them only after it has claimed a chunk.
struct Pool {
  std::mutex run_mutex;
  std::atomic<int> wanted_threads{1};
  std::vector<pthread_t> workers;
  Share* shares = nullptr;  // one a thread, the caller's first
  int num_shares = 0;

  void (*fn)(void*, int) = nullptr;
  void* context = nullptr;

  alignas(64) std::atomic<uint32_t> job{0};
  alignas(64) std::atomic<uint32_t> pending{0};  // chunks not finished
  std::atomic<bool> caller_sleeps{false};
  alignas(64) std::atomic<uint32_t> sleepers{0};
  std::atomic<bool> stop{false};

  void run_chunk(int chunk) {
    fn(context, chunk);
    if (pending.fetch_sub(1, std::memory_order_seq_cst) == 1 && caller_sleeps.load(std::memory_order_seq_cst)) {
      futex_wake(pending, 1);
    }
  }

  // Runs what is left of this thread's share of a job, then of the others'. Of that job alone: a thread that is late
  // must not take from a job whose shares are still being dealt, for its own is then dealt over what it has taken.
  void work(int self, uint32_t number) {
    for (int victim = self, tried = 0; tried < num_shares;) {
      for (int chunk; (chunk = shares[self].take(number)) >= 0;) run_chunk(chunk);
      victim = (victim + 1) % num_shares;
      const uint64_t taken = victim == self ? 0 : shares[victim].take_half(number);
      tried = taken ? 0 : tried + 1;
      if (taken) shares[self].range.store(taken, std::memory_order_release);
    }
  }

  void worker_loop(int self) {
    uint32_t seen = 0;
    const auto has_news = [&] { return job.load(std::memory_order_acquire) != seen || stop.load(); };
    while (!stop.load(std::memory_order_acquire)) {
      seen = job.load(std::memory_order_acquire);
      work(self, seen);
      if (spin_until(has_news, kIdleSpin)) continue;
      sleepers.fetch_add(1, std::memory_order_seq_cst);
      if (!has_news()) futex_wait(job, seen);
      sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  void announce() {
    job.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(job, INT_MAX);
  }

  void start_workers();
  void stop_workers() {
    stop.store(true, std::memory_order_seq_cst);
    announce();
    for (pthread_t worker : workers) pthread_join(worker, nullptr);
    workers.clear();
    stop.store(false, std::memory_order_seq_cst);
  }

  void run(int count, void (*body)(void*, int), void* body_context) {
    if (num_shares != wanted_threads.load()) start_workers();
    fn = body;
    context = body_context;
    pending.store(static_cast<uint32_t>(count), std::memory_order_relaxed);
    const uint32_t number = job.load(std::memory_order_relaxed) + 1u;
    for (int i = 0; i < num_shares; ++i) {
      const uint64_t begin = static_cast<uint64_t>(count) * i / num_shares;
      const uint64_t end = static_cast<uint64_t>(count) * (i + 1) / num_shares;
      shares[i].range.store(static_cast<uint64_t>(number) << 32 | begin << 16 | end, std::memory_order_release);
    }
    announce();
    work(0, number);
    const auto done = [this] { return pending.load(std::memory_order_acquire) == 0; };
    if (spin_until(done, kFinishSpin)) return;
    // A worker has lost its core. Sleeping gives it ours, where the scheduler may move it.
    caller_sleeps.store(true, std::memory_order_seq_cst);
    for (uint32_t left = pending.load(std::memory_order_seq_cst); left != 0;
         left = pending.load(std::memory_order_seq_cst)) {
      futex_wait(pending, left);
    }
    caller_sleeps.store(false, std::memory_order_relaxed);
  }
};

// Never destroyed: workers may still spin while the process exits.
Pool& pool() {
  static Pool* const instance = [] {
    Pool* made = new Pool;
    // A forked child has none of the workers: it starts over.
    pthread_atfork(nullptr, nullptr, [] {
      const int threads = pool().wanted_threads.load();
      new (&pool()) Pool;
      pool().wanted_threads.store(threads);
    });
    return made;
  }();
  return *instance;
}

void* worker_main(void* index) {
  pool().worker_loop(static_cast<int>(reinterpret_cast<intptr_t>(index)));
  return nullptr;
}

void Pool::start_workers() {
  stop_workers();
  delete[] shares;
  num_shares = wanted_threads.load();
  shares = new Share[num_shares];
  // Signals are the business of the threads that existed before.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int i = 1; i < num_shares; ++i) {
    pthread_t worker;
    // Where the system allows no more threads, the others do their chunks.
    if (pthread_create(&worker, nullptr, worker_main, reinterpret_cast<void*>(static_cast<intptr_t>(i))) != 0) break;
    pthread_setname_np(worker, "sonar-cpu");
    workers.push_back(worker);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

struct Buffer {
  void* data = nullptr;
  size_t bytes = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

void set_num_threads(int n) {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.run_mutex);
  p.wanted_threads.store(n < 1 ? 1 : n > 512 ? 512 : n);
}

int num_threads() { return pool().wanted_threads.load(); }

void parallel_for(int chunks, void (*fn)(void* context, int chunk), void* context) {
  Pool& p = pool();
  if (chunks > 1 && chunks <= kMaxChunks && p.wanted_threads > 1 && p.run_mutex.try_lock()) {
    p.run(chunks, fn, context);
    p.run_mutex.unlock();
    return;
  }
  for (int chunk = 0; chunk < chunks; ++chunk) fn(context, chunk);
}

void* scratch(Scratch purpose, size_t bytes) {
  thread_local Buffer buffers[kNumScratch];
  Buffer& buffer = buffers[static_cast<int>(purpose)];
  if (buffer.bytes < bytes) {
    std::free(buffer.data);
    buffer.bytes = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(4096, buffer.bytes);
    if (!buffer.data) std::abort();  // a few MiB are gone: nothing here can go on
  }
  return buffer.data;
}
