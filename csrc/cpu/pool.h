// The one pool of threads that every kernel shares, and per-thread scratch memory.
//
// Work comes as numbered chunks. Each thread, the caller among them, walks through a share of its own in order and then
// takes over half of what another has left: a core that another process has taken delays the chunk it holds, not half
// of the work; a thread that stalls so is left out for some milliseconds. Idle threads spin for some tens of
// microseconds, since the next call of a decode step is that near, then sleep on a futex. Threads are not pinned: the
// scheduler may move one off a core that others want.
#pragma once

#include <cstddef>
#include <type_traits>

// Threads that take part in a call, the caller included. Waits for a running call. Clamped to [1, 512].
void set_num_threads(int n);
int num_threads();

// Runs fn(context, chunk) for chunk = 0 .. chunks - 1 and returns when all are done. Never throws. A second thread that
// calls while one call runs does its chunks by itself. A chunk must not call it.
void parallel_for(int chunks, void (*fn)(void* context, int chunk), void* context);

template <class Body>
void parallel_for(int chunks, Body&& body) {
  using Plain = typename std::remove_reference<Body>::type;
  parallel_for(
      chunks, [](void* context, int chunk) { (*static_cast<Plain*>(context))(chunk); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// This thread's scratch memory of a purpose, aligned to a page, kept and grown. Purposes are apart since a caller's own
// buffers must outlive the work its thread does on chunks.
enum class Scratch { kLayer, kCall, kOutput, kChunk };
constexpr int kNumScratch = 4;
void* scratch(Scratch purpose, size_t bytes);
