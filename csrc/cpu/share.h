// A thread's share of a job's chunks, which others may take from, and how long a thread that lost its core is left out.
// Knows no thread and no clock. Used by pool.cpp.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

using Clock = std::chrono::steady_clock;

// A job's number and the chunks [begin, end) of it, in one word that is exchanged as a whole.
struct Range {
  static constexpr int kMaxChunks = 0xffff;
  uint64_t bits = 0;

  static Range of(uint32_t job, uint32_t begin, uint32_t end) {
    return {static_cast<uint64_t>(job) << 32 | static_cast<uint64_t>(begin) << 16 | end};
  }
  uint32_t job() const { return static_cast<uint32_t>(bits >> 32); }
  uint32_t begin() const { return bits >> 16 & 0xffff; }
  uint32_t end() const { return bits & 0xffff; }
  bool has_chunks_of(uint32_t number) const { return job() == number && begin() < end(); }
};

struct alignas(64) Share {
  std::atomic<uint64_t> range{0};
  std::atomic<uint32_t> works_on{0};  // the job that its thread is at, 0 when at none
  std::atomic<uint32_t> sleeps{0};    // 1 from before its thread sleeps until somebody wakes it; a futex

  bool is_of(uint32_t job) const { return Range{range.load(std::memory_order_acquire)}.job() == job; }

  void deal(Range dealt) { range.store(dealt.bits, std::memory_order_release); }

  // The first chunk of that job, or -1.
  int take(uint32_t job) {
    Range seen{range.load(std::memory_order_acquire)};
    while (seen.has_chunks_of(job)) {
      const Range rest = Range::of(job, seen.begin() + 1, seen.end());
      if (exchange(seen, rest)) return static_cast<int>(seen.begin());
    }
    return -1;
  }

  // The back half (of one chunk, all) for the caller to put into its own share; nothing if there is none of that job.
  Range take_half(uint32_t job) {
    Range seen{range.load(std::memory_order_acquire)};
    while (seen.has_chunks_of(job)) {
      const uint32_t middle = seen.begin() + (seen.end() - seen.begin()) / 2;
      if (exchange(seen, Range::of(job, seen.begin(), middle))) return Range::of(job, middle, seen.end());
    }
    return {};
  }

 private:
  bool exchange(Range& seen, Range next) {
    return range.compare_exchange_weak(seen.bits, next.bits, std::memory_order_acq_rel, std::memory_order_acquire);
  }
};

// How long a thread is left out after it kept the others waiting: somebody else wants its core. A short while at first;
// twice as long whenever it stalls again soon after it was back, so that a core that is taken for good costs one stall
// in a fifth of a second (a stall is some 3 ms, the scheduler's slice).
class Absence {
 public:
  static constexpr Clock::duration kShortest = std::chrono::milliseconds(2);
  static constexpr Clock::duration kLongest = std::chrono::milliseconds(256);
  static constexpr int kProbation = 8;  // times the last absence: within it a stall is "again"

  bool is_over(Clock::time_point now) const { return now >= until_; }

  void begin(Clock::time_point now) {
    const bool again = length_ > Clock::duration::zero() && now < until_ + kProbation * length_;
    length_ = again ? std::min(2 * length_, kLongest) : kShortest;
    until_ = now + length_;
  }

 private:
  Clock::duration length_{0};
  Clock::time_point until_{};
};
