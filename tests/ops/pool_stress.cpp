// Calls the pool at random for some seconds and checks that every chunk of every call ran once, before the call was
// over: pool_stress SECONDS SEED. Also the policy of absences. Built by test_cpu_pool.py, under the thread sanitizer:
// chunks write plain memory. A thread that only burns time takes a core away from the pool's now and then.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "pool.h"
#include "share.h"

namespace {

void burn(std::chrono::microseconds time) {
  for (const Clock::time_point end = Clock::now() + time; Clock::now() < end;) {
  }
}

// Returns the chunks that did not run exactly once. Some calls have a slow chunk, some have none that is fast.
int run_call(std::mt19937& draw, int chunks, std::vector<int>& times_run) {
  const int slow = draw() % 8 ? -1 : static_cast<int>(draw() % chunks);
  const std::chrono::microseconds slow_time(draw() % 400), time(chunks <= 40 && draw() % 4 == 0 ? draw() % 30 : 0);
  times_run.assign(chunks, 0);
  parallel_for(chunks, [&](int chunk) {
    times_run[chunk] += 1;
    if (chunk == slow) burn(slow_time);
    if (time.count()) burn(time);
  });
  int wrong = 0;
  for (int times : times_run) wrong += times != 1;
  return wrong;
}

int draw_chunks(std::mt19937& draw) {
  static constexpr unsigned kSizes[] = {2, 3, 7, 40, 300, 3000};
  return static_cast<int>(1 + draw() % kSizes[draw() % 6]);
}

// A thread that stalls again soon after it was back is left out for twice as long, up to a limit; later, as at first.
bool absences_grow_and_are_forgotten() {
  Absence absence;
  Clock::time_point now = Clock::time_point{} + std::chrono::hours(1);
  if (!absence.is_over(now)) return false;
  for (Clock::duration expected = Absence::kShortest; expected < 4 * Absence::kLongest; expected *= 2) {
    const Clock::duration length = std::min(expected, Absence::kLongest);
    absence.begin(now);
    if (absence.is_over(now + length - Clock::duration(1)) || !absence.is_over(now + length)) return false;
    now += length + std::chrono::microseconds(100);
  }
  now += (Absence::kProbation + 1) * Absence::kLongest;
  absence.begin(now);
  return absence.is_over(now + Absence::kShortest);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  if (!absences_grow_and_are_forgotten()) return 3;
  const Clock::time_point end = Clock::now() + std::chrono::milliseconds(std::lround(1e3 * std::atof(arguments[1])));
  const unsigned seed = static_cast<unsigned>(std::atoi(arguments[2]));
  std::atomic<long> calls{0}, wrong{0};
  set_num_threads(4);
  std::vector<std::thread> threads;
  for (unsigned caller = 0; caller < 2; ++caller) {
    threads.emplace_back([&, caller] {
      std::mt19937 draw(seed * 2 + caller);
      std::vector<int> times_run;
      wrong += run_call(draw, 200000, times_run);  // more than a share can number
      for (; Clock::now() < end; ++calls) {
        if (draw() % 200 == 0) set_num_threads(1 + static_cast<int>(draw() % 6));
        wrong += run_call(draw, draw_chunks(draw), times_run);
        if (draw() % 100 == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw() % 300));  // workers sleep
      }
    });
  }
  threads.emplace_back([&] {
    for (std::mt19937 draw(seed); Clock::now() < end;) {
      burn(std::chrono::microseconds(draw() % 5000));
      std::this_thread::sleep_for(std::chrono::microseconds(draw() % 5000));
    }
  });
  for (std::thread& thread : threads) thread.join();
  std::printf("%ld calls, %ld chunks wrong\n", calls.load(), wrong.load());
  return wrong.load() == 0 && calls.load() > 0 ? 0 : 1;
}
