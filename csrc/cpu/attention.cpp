// Cuts attention into units for the pool: blocks of query tokens of one key/value head, or, when there are few such and
// their past is long, parts of their keys. How it is cut changes no bit (see kernels/attention.h).
#include <algorithm>
#include <vector>

#include "isa.h"
#include "pool.h"
#include "row_ops.h"

namespace {

constexpr int kUnitRows = 60;     // query rows (tokens times heads that share a key/value head) of a unit, about
constexpr int kMinPartTiles = 4;  // key tiles worth a part of their own

int num_queries(const AttentionTask& task, int request) {
  return task.query_start[request + 1] - task.query_start[request];
}

// The unit with the key tiles its tokens see.
AttentionUnit make_unit(const AttentionTask& task, int request, int kv_head, int first_token, int num_tokens) {
  const int past = task.seq_lens[request] - num_queries(task, request);
  const int first_key = task.window > 0 ? std::max(0, past + first_token - task.window + 1) : 0;
  const int last_key = past + first_token + num_tokens - 1;
  return {request, kv_head, first_token, num_tokens, first_key / kKeyTile, last_key / kKeyTile + 1, nullptr};
}

void make_units(const AttentionTask& task, int num_requests, std::vector<AttentionUnit>& units) {
  const int tokens_per_unit = std::max(1, kUnitRows / (task.num_heads / task.num_kv_heads));
  for (int request = 0; request < num_requests; ++request) {
    const int count = num_queries(task, request);
    // The last tokens see the most keys: they go first, so that the chunks that end together are short ones.
    for (int end = count; end > 0; end -= tokens_per_unit) {
      const int first = std::max(0, end - tokens_per_unit);
      for (int g = 0; g < task.num_kv_heads; ++g) units.push_back(make_unit(task, request, g, first, end - first));
    }
  }
}

// Runs units in chunks of some, so that a thread knows what it will read next.
void run_units(const AttentionTask& task, const std::vector<AttentionUnit>& units) {
  const int num_units = static_cast<int>(units.size()), step = std::max(1, num_units / (6 * num_threads()));
  parallel_for((num_units + step - 1) / step, [&](int chunk) {
    const int end = std::min(num_units, (chunk + 1) * step);
    for (int i = chunk * step; i < end; ++i) {
      const int rows = units[i].num_tokens * (task.num_heads / task.num_kv_heads);
      const size_t bytes = isa().attention_scratch_floats(task, rows) * sizeof(float);
      const AttentionUnit* next = i + 1 < end ? &units[i + 1] : nullptr;
      isa().attention_unit(task, units[i], next, static_cast<float*>(scratch(Scratch::kChunk, bytes)));
    }
  });
}

// Splits each unit's tiles into parts, runs them, and merges their records in order.
void run_split(const AttentionTask& task, std::vector<AttentionUnit>& units, int parts_per_unit) {
  thread_local std::vector<AttentionUnit> parts;
  parts.clear();
  const int ratio = task.num_heads / task.num_kv_heads,
            stride = static_cast<int>(round_up(task.head_dim, kLanes)) + kLanes;
  int64_t floats = 0;
  for (const AttentionUnit& unit : units)
    floats += static_cast<int64_t>(unit.end_tile) * unit.num_tokens * ratio * stride;
  float* records = static_cast<float*>(scratch(Scratch::kCall, floats * sizeof(float)));
  for (AttentionUnit& unit : units) {
    unit.partials = records;
    records += static_cast<int64_t>(unit.end_tile) * unit.num_tokens * ratio * stride;
    const int tiles = unit.end_tile - unit.first_tile;
    const int step = std::max(kMinPartTiles, (tiles + parts_per_unit - 1) / parts_per_unit);
    for (int first = unit.first_tile; first < unit.end_tile; first += step) {
      parts.push_back(unit);
      parts.back().first_tile = first;
      parts.back().end_tile = std::min(first + step, unit.end_tile);
    }
  }
  run_units(task, parts);
  parallel_for(static_cast<int>(units.size()), [&](int i) {
    const size_t bytes = isa().attention_scratch_floats(task, units[i].num_tokens * ratio) * sizeof(float);
    isa().attention_merge(task, units[i], static_cast<float*>(scratch(Scratch::kChunk, bytes)));
  });
}

}  // namespace

void attention(const AttentionTask& task, int num_requests) {
  thread_local std::vector<AttentionUnit> units;
  units.clear();
  make_units(task, num_requests, units);
  int64_t tiles = 0;
  bool decode_only = true;
  for (const AttentionUnit& unit : units) {
    tiles += unit.end_tile - unit.first_tile;
    decode_only = decode_only && unit.num_tokens == 1;
  }
  const int wanted = 4 * num_threads();
  if (num_threads() > 1 && decode_only && static_cast<int>(units.size()) < wanted &&
      tiles >= 2 * kMinPartTiles * static_cast<int64_t>(units.size())) {
    run_split(task, units, (wanted + static_cast<int>(units.size()) - 1) / static_cast<int>(units.size()));
  } else {
    run_units(task, units);
  }
}
