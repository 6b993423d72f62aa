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

// Owns the workers and the one job that runs. A job's fields are written only while no chunk of the previous one is
// claimed and unfinished; a worker reads them only after it has claimed a chunk.
struct Pool {
  std::mutex run_mutex;
  std::atomic<int> wanted_threads{1};
  std::vector<pthread_t> workers;

  void (*fn)(void*, int) = nullptr;
  void* context = nullptr;
  uint32_t chunks = 0;

  alignas(64) std::atomic<uint64_t> ticket{0};   // job number << 32 | chunks nobody has claimed
  alignas(64) std::atomic<uint32_t> pending{0};  // chunks not finished
  std::atomic<bool> caller_sleeps{false};
  alignas(64) std::atomic<uint32_t> wake_count{0};
  std::atomic<uint32_t> sleepers{0};
  std::atomic<bool> stop{false};

  bool has_work() const { return static_cast<uint32_t>(ticket.load(std::memory_order_acquire)) != 0; }

  // Claims and runs chunks until none is left. The job number in the ticket keeps a late claim off the next job.
  void work() {
    uint64_t seen = ticket.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(seen) != 0) {
      if (!ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      fn(context, static_cast<int>(chunks - static_cast<uint32_t>(seen)));
      if (pending.fetch_sub(1, std::memory_order_seq_cst) == 1 && caller_sleeps.load(std::memory_order_seq_cst)) {
        futex_wake(pending, 1);
      }
      seen = ticket.load(std::memory_order_acquire);
    }
  }

  void worker_loop() {
    while (!stop.load(std::memory_order_acquire)) {
      work();
      if (spin_until([this] { return has_work() || stop.load(std::memory_order_acquire); }, kIdleSpin)) continue;
      sleepers.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t seen = wake_count.load(std::memory_order_seq_cst);
      if (!has_work() && !stop.load(std::memory_order_seq_cst)) futex_wait(wake_count, seen);
      sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  void wake_sleepers() {
    wake_count.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(wake_count, INT_MAX);
  }

  void start_workers();
  void stop_workers() {
    stop.store(true, std::memory_order_seq_cst);
    wake_sleepers();
    for (pthread_t worker : workers) pthread_join(worker, nullptr);
    workers.clear();
    stop.store(false, std::memory_order_seq_cst);
  }

  void run(int count, void (*body)(void*, int), void* body_context) {
    if (workers.size() + 1 != static_cast<size_t>(wanted_threads.load())) start_workers();
    fn = body;
    context = body_context;
    chunks = static_cast<uint32_t>(count);
    pending.store(chunks, std::memory_order_relaxed);
    const uint64_t job = (ticket.load(std::memory_order_relaxed) >> 32) + 1;
    ticket.store(job << 32 | chunks, std::memory_order_seq_cst);
    wake_sleepers();
    work();
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

void* worker_main(void*) {
  pool().worker_loop();
  return nullptr;
}

void Pool::start_workers() {
  stop_workers();
  // Signals are the business of the threads that existed before.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int i = 1; i < wanted_threads; ++i) {
    pthread_t worker;
    if (pthread_create(&worker, nullptr, worker_main, nullptr) != 0) {
      wanted_threads.store(i);  // the system allows no more
      break;
    }
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
  if (chunks > 1 && p.wanted_threads > 1 && p.run_mutex.try_lock()) {
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
