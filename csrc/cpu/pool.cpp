// How a job runs, and why no chunk is lost or run twice.
//
// A job has a number, one more than the last one's. The caller writes the job's fields (body, chunks, pending), deals
// shares, each marked with the number, and then publishes the number. A thread takes part in job N only once it has
// read N as published and found its own share marked N, and takes chunks only from shares marked N. Hence
//   1. each chunk is in exactly one share, or taken by exactly one thread: a share changes by one exchange of the whole
//      word, and what a thread has taken over it puts into its own share, which is empty then. Nobody else fills that
//      share meanwhile: others only take from it, and the caller deals only when `pending` is 0, while this thread has
//      chunks that are pending. An exchange cannot mistake a share for what it was before: a range of job N that was
//      emptied never comes back, since its chunks are taken;
//   2. a late thread does nothing: its number is old, and no share is marked so. (It would have to sleep through 2^32
//      jobs between two instructions to meet its number again.)
//   3. what a chunk reads was written before: fields -> number (release), number (acquire) -> chunk; and what it wrote
//   is
//      seen by the caller: every chunk's decrement of `pending` belongs to one release sequence, which the caller reads
//      to its end.
// Sleeping: a thread sets its flag, counts itself as a sleeper, then looks for news; the caller publishes, then looks
// for sleepers. Both are sequentially consistent, so one sees the other. The caller sleeps on `pending` in the same
// way.
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "share.h"

namespace {

constexpr auto kIdleSpin = std::chrono::microseconds(60);
constexpr auto kFinishSpin = std::chrono::microseconds(30);
// Waiting this long for others, and this many times a chunk of this job, means that one has lost its core.
constexpr Clock::duration kStall = std::chrono::microseconds(100);
constexpr int kStallChunks = 8;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The word is a 32-bit atomic: the kernel reads it where it lies. A timeout of zero is none.
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, Clock::duration timeout = Clock::duration::zero()) {
  const timespec relative{timeout / std::chrono::seconds(1), (timeout % std::chrono::seconds(1)).count()};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen,
          timeout > Clock::duration::zero() ? &relative : nullptr, nullptr, 0);
}
void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
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

// Owns the workers and the one job that runs.
class Pool {
 public:
  std::mutex run_mutex;
  std::atomic<int> wanted_threads{1};

  // Runs a job. The caller holds run_mutex.
  void run(int count, void (*body)(void*, int), void* body_context);
  void worker_loop(int self);

 private:
  void start_workers();
  void stop_workers();
  void run_item(uint32_t item);
  int work(int self, uint32_t number);
  void sleep(Share& share, uint32_t seen);
  int choose_threads();
  void deal(uint32_t number, uint32_t items, int num_dealt);
  void publish(uint32_t number);
  void wait_for_others(uint32_t number, Clock::duration limit);
  void leave_out_stalled(uint32_t number);

  // Of threads; the caller is the first.
  std::vector<pthread_t> workers_;
  std::unique_ptr<Share[]> shares_;
  std::vector<Absence> absences_;
  std::vector<char> is_out_;
  int num_shares_ = 0;
  int num_out_ = 0;

  // Of the job. An item is a chunk, or some where there are more than a range can number.
  void (*fn_)(void*, int) = nullptr;
  void* context_ = nullptr;
  int num_chunks_ = 0;
  int chunks_per_item_ = 1;

  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<uint32_t> pending_{0};  // items not finished; a futex
  std::atomic<bool> caller_sleeps_{false};
  alignas(64) std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stop_{false};
};

void Pool::run_item(uint32_t item) {
  const int64_t first = static_cast<int64_t>(item) * chunks_per_item_;
  const int end = static_cast<int>(std::min<int64_t>(first + chunks_per_item_, num_chunks_));
  for (int chunk = static_cast<int>(first); chunk < end; ++chunk) fn_(context_, chunk);
  if (pending_.fetch_sub(1, std::memory_order_seq_cst) == 1 && caller_sleeps_.load(std::memory_order_seq_cst)) {
    futex_wake(pending_);
  }
}

// Runs what is left of this thread's share, then takes over from the others', next neighbour first, until there is
// nothing. Returns the items it ran.
int Pool::work(int self, uint32_t number) {
  Share& own = shares_[self];
  own.works_on.store(number, std::memory_order_release);
  int num_run = 0;
  for (int victim = self, tried = 0; tried < num_shares_;) {
    for (int item; (item = own.take(number)) >= 0; ++num_run) run_item(static_cast<uint32_t>(item));
    victim = victim + 1 < num_shares_ ? victim + 1 : 0;
    const Range taken = victim == self ? Range{} : shares_[victim].take_half(number);
    tried = taken.bits ? 0 : tried + 1;
    if (taken.bits) own.deal(taken);
  }
  own.works_on.store(0, std::memory_order_release);
  return num_run;
}

void Pool::worker_loop(int self) {
  Share& own = shares_[self];
  while (!stop_.load(std::memory_order_acquire)) {
    const uint32_t seen = job_.load(std::memory_order_acquire);
    if (own.is_of(seen)) {
      work(self, seen);
      if (spin_until([&] { return job_.load(std::memory_order_acquire) != seen; }, kIdleSpin)) continue;
    }
    sleep(own, seen);
  }
}

void Pool::sleep(Share& share, uint32_t seen) {
  share.sleeps.store(1, std::memory_order_seq_cst);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  if (job_.load(std::memory_order_seq_cst) == seen && !stop_.load(std::memory_order_seq_cst)) {
    futex_wait(share.sleeps, 1);
  }
  share.sleeps.store(0, std::memory_order_seq_cst);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

// Lets threads back whose absence is over. Returns how many take part, the caller among them.
int Pool::choose_threads() {
  if (num_out_ > 0) {
    const Clock::time_point now = Clock::now();
    for (int i = 1; i < num_shares_; ++i) {
      if (!is_out_[i] || !absences_[i].is_over(now)) continue;
      is_out_[i] = 0;
      --num_out_;
    }
  }
  return num_shares_ - num_out_;
}

void Pool::deal(uint32_t number, uint32_t items, int num_dealt) {
  uint64_t place = 0;
  for (int i = 0; i < num_shares_; ++i) {
    if (is_out_[i]) continue;
    const uint32_t begin = static_cast<uint32_t>(items * place / num_dealt);
    const uint32_t end = static_cast<uint32_t>(items * ++place / num_dealt);
    shares_[i].deal(Range::of(number, begin, end));
  }
}

void Pool::publish(uint32_t number) {
  job_.store(number, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  for (int i = 1; i < num_shares_; ++i) {
    if (is_out_[i] || shares_[i].sleeps.load(std::memory_order_seq_cst) == 0) continue;
    if (shares_[i].sleeps.exchange(0, std::memory_order_seq_cst)) futex_wake(shares_[i].sleeps);
  }
}

void Pool::wait_for_others(uint32_t number, Clock::duration limit) {
  const auto done = [this] { return pending_.load(std::memory_order_acquire) == 0; };
  const Clock::time_point since = Clock::now();
  if (spin_until(done, kFinishSpin)) return;
  // Sleeping gives a worker that has lost its core ours, where the scheduler may move it.
  caller_sleeps_.store(true, std::memory_order_seq_cst);
  bool is_stall = false;
  for (uint32_t left; (left = pending_.load(std::memory_order_seq_cst)) != 0;) {
    const Clock::duration rest = since + limit - Clock::now();
    if (!is_stall && rest <= Clock::duration::zero()) {
      leave_out_stalled(number);
      is_stall = true;
    }
    futex_wait(pending_, left, is_stall ? Clock::duration::zero() : rest);
  }
  caller_sleeps_.store(false, std::memory_order_relaxed);
}

void Pool::leave_out_stalled(uint32_t number) {
  const Clock::time_point now = Clock::now();
  for (int i = 1; i < num_shares_; ++i) {
    if (is_out_[i] || shares_[i].works_on.load(std::memory_order_acquire) != number) continue;
    absences_[i].begin(now);
    is_out_[i] = 1;
    ++num_out_;
  }
}

void Pool::run(int count, void (*body)(void*, int), void* body_context) {
  if (num_shares_ != wanted_threads.load()) start_workers();
  const int num_dealt = choose_threads();
  if (num_dealt == 1) {
    for (int chunk = 0; chunk < count; ++chunk) body(body_context, chunk);
    return;
  }
  fn_ = body;
  context_ = body_context;
  num_chunks_ = count;
  chunks_per_item_ = (count + Range::kMaxChunks - 1) / Range::kMaxChunks;
  const uint32_t items = static_cast<uint32_t>((count + chunks_per_item_ - 1) / chunks_per_item_);
  const uint32_t number = job_.load(std::memory_order_relaxed) + 1u;
  pending_.store(items, std::memory_order_relaxed);
  deal(number, items, num_dealt);
  const Clock::time_point begin = Clock::now();
  publish(number);
  const int num_run = work(0, number);
  if (pending_.load(std::memory_order_acquire) == 0) return;
  const Clock::duration an_item = (Clock::now() - begin) / std::max(num_run, 1);
  wait_for_others(number, std::max(kStall, kStallChunks * an_item));
}

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

void Pool::stop_workers() {
  stop_.store(true, std::memory_order_seq_cst);
  std::fill(is_out_.begin(), is_out_.end(), char{0});
  publish(job_.load(std::memory_order_relaxed) + 1u);
  for (pthread_t worker : workers_) pthread_join(worker, nullptr);
  workers_.clear();
  stop_.store(false, std::memory_order_seq_cst);
}

void Pool::start_workers() {
  stop_workers();
  num_shares_ = wanted_threads.load();
  shares_.reset(new Share[num_shares_]);
  absences_.assign(num_shares_, Absence{});
  is_out_.assign(num_shares_, 0);
  num_out_ = 0;
  // Signals are the business of the threads that existed before.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int i = 1; i < num_shares_; ++i) {
    pthread_t worker;
    // Where the system allows no more threads, the others do their chunks.
    if (pthread_create(&worker, nullptr, worker_main, reinterpret_cast<void*>(static_cast<intptr_t>(i))) != 0) break;
    pthread_setname_np(worker, "sonar-cpu");
    workers_.push_back(worker);
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
