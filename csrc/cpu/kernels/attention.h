// Paged causal attention in float32, in tiles of 64 keys at fixed absolute positions.
//
// For a query row and a tile: scores s = sum over e in order of (q scale)[e] k[e] (, soft cap); m = max s, p = e^(s -
// m), l = sum p, a = sum over keys in order of p v. Tiles are merged in order:
//   M' = max(M, m);  L = L e^(M - M') + l e^(m - M');  A alike.  Output A / L.
// (The online softmax of Milakov and Gimelshein 2018, with every tile formed on its own.) Keys a row may not see have
// p = 0, which changes nothing, so a row's bits do not depend on the rows beside it, on how a prompt was cut, or on
// whether tiles were split among threads. Included by isa.cpp.
#pragma once

#include "elementary.h"
#include "rows.h"

constexpr float kNegativeInfinity = -__builtin_inff();
constexpr int kRecordHead = 16;  // floats before the values of a partial record: m, l, padding

SIMD int padded_dim(const AttentionTask& task) { return (task.head_dim + kLanes - 1) / kLanes * kLanes; }

// Pieces of one worker's scratch memory.
struct AttentionScratch {
  float* q;       // [rows][head_dim], scaled
  float* keys;    // [padded dim][kKeyTile]
  float* values;  // [kKeyTile][padded dim], where the cache cannot be read in place
  float* max;     // [rows]
  float* sum;     // [rows]
  float* acc;     // [rows][padded dim]
};

// A tile as one key/value head of a request sees it.
struct TileView {
  int first_key;                   // absolute position of the tile
  int begin, end;                  // keys of the tile that any row of the unit sees
  const char* key_rows[kKeyTile];  // outside of [begin, end) some row of the request's
  const float* value_rows[kKeyTile];
};

template <int TYPE>
SIMD F load_cached(const char* p, int i, int n) {
  if constexpr (TYPE == kF32) return load_upto(reinterpret_cast<const float*>(p) + i, n);
  uint16_t halves[16] = {};
  __builtin_memcpy(halves, reinterpret_cast<const uint16_t*>(p) + i, n * 2);
  return TYPE == kF16 ? load_f16(halves) : as_float(shift_left(load_u16(halves), 16));
}

SIMD int query_position(const AttentionTask& task, const AttentionUnit& unit, int token) {
  const int num_queries = task.query_start[unit.request + 1] - task.query_start[unit.request];
  return task.seq_lens[unit.request] - num_queries + token;
}

struct RowRange {
  int begin, end;  // keys of the tile the row sees; none when begin >= end
};

SIMD RowRange row_range(const AttentionTask& task, const TileView& tile, int position) {
  int begin = task.window > 0 ? position - task.window + 1 - tile.first_key : 0;
  int end = position + 1 - tile.first_key;
  begin = begin < 0 ? 0 : begin;
  end = end > kKeyTile ? kKeyTile : end;
  return {begin, end};
}

// Finds where the tile's keys lie.
SIMD void find_tile(const AttentionTask& task, const AttentionUnit& unit, int index, TileView& tile) {
  tile.first_key = index * kKeyTile;
  tile.begin = row_range(task, tile, query_position(task, unit, unit.first_token)).begin;
  tile.end = row_range(task, tile, query_position(task, unit, unit.first_token + unit.num_tokens - 1)).end;
  const int32_t* table = task.block_table + unit.request * task.block_table_stride;
  const char* head = static_cast<const char*>(task.cache) + unit.kv_head * task.stride_head;
  int block = (tile.first_key + tile.begin) / task.block_size, slot = (tile.first_key + tile.begin) % task.block_size;
  for (int j = tile.begin; j < tile.end; ++j) {
    tile.key_rows[j] = head + table[block] * task.stride_block + slot * task.stride_slot;
    if (++slot == task.block_size) {
      slot = 0;
      ++block;
    }
  }
  for (int j = 0; j < tile.begin; ++j) tile.key_rows[j] = tile.key_rows[tile.begin];
  for (int j = tile.end; j < kKeyTile; ++j) tile.key_rows[j] = tile.key_rows[tile.begin];
}

// Asks for the lines of the tile that comes next, a few at a time between sums: all at once they would wait for each
// other, and none would be under way during the sums (see prefetch_block). Into the second-level cache: the first holds
// the current tile.
struct Ahead {
  const TileView* tile;  // null: nothing is known to come
  int64_t stride_kv;
  int row_bytes;
  int row = 0, at = 0;

  __attribute__((always_inline)) void lines(int count) {
    if (!tile) return;
    for (; count > 0 && row < kKeyTile; --count) {
      __builtin_prefetch(tile->key_rows[row] + at, 0, 2);
      __builtin_prefetch(tile->key_rows[row] + at + stride_kv, 0, 2);
      at += 64;
      if (at >= row_bytes) at = 0, ++row;
    }
  }
};
constexpr int kLinesAhead = 2;  // pairs of lines a round: 64 numbers of keys and of values take 128 rounds

// Turns the tile's keys to [e][key] and finds, or converts, its values. Columns outside of [begin, end) hold anything:
// their scores are masked.
template <int TYPE>
static void load_tile(const AttentionTask& task, TileView& tile, AttentionScratch& scratch) {
  const int e = task.head_dim, padded = padded_dim(task);
  for (int first = 0; first < kKeyTile; first += kLanes) {
    if (first + kLanes <= tile.begin || first >= tile.end) continue;
    for (int i = 0; i < padded; i += kLanes) {
      const int n = e - i < kLanes ? e - i : kLanes;
      F block[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) block[j] = load_cached<TYPE>(tile.key_rows[first + j], i, n);
      transpose_store(block, scratch.keys + i * kKeyTile + first, kKeyTile);
    }
  }
  for (int j = tile.begin; j < tile.end; ++j) {
    const char* row = tile.key_rows[j] + task.stride_kv;
    if (TYPE == kF32 && e == padded) {
      tile.value_rows[j] = reinterpret_cast<const float*>(row);
      continue;
    }
    float* copy = scratch.values + j * padded;
    for (int i = 0; i < padded; i += kLanes) {
      store(copy + i, load_cached<TYPE>(row, i, e - i < kLanes ? e - i : kLanes));
    }
    tile.value_rows[j] = copy;
  }
}

template <int R>
SIMD void score_rows(const float* q, int head_dim, const float* keys, float* scores, Ahead& ahead) {
  for (int column = 0; column < kKeyTile; column += kColTile * kLanes) {
    F sum[R][kColTile];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kColTile; ++c) sum[r][c] = zero();
    for (int e = 0; e < head_dim; ++e) {
      if (column == 0) ahead.lines(kLinesAhead);
      F key[kColTile];
#pragma GCC unroll 4
      for (int c = 0; c < kColTile; ++c) key[c] = load(keys + e * kKeyTile + column + c * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F value = set1(q[r * head_dim + e]);
#pragma GCC unroll 4
        for (int c = 0; c < kColTile; ++c) sum[r][c] = fma(value, key[c], sum[r][c]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kColTile; ++c) store(scores + r * kKeyTile + column + c * kLanes, sum[r][c]);
  }
}

template <int R, int C>
SIMD void value_columns(const float* p, const TileView& tile, int end, int column, float* out, int padded,
                        Ahead& ahead) {
  F sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = zero();
  for (int j = tile.begin; j < end; ++j) {
    ahead.lines(kLinesAhead);
    F value[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) value[c] = load(tile.value_rows[j] + column + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F weight = set1(p[r * kKeyTile + j]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[r][c] = fma(weight, value[c], sum[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(out + r * padded + column + c * kLanes, sum[r][c]);
}

// Scores to weights p in place; gives the row's max and sum. Sees keys [begin, end) of the tile.
SIMD void softmax_row(const AttentionTask& task, float* scores, int begin, int end, float& max_out, float& sum_out) {
  constexpr int n = kKeyTile / kLanes;
  F s[n];
  for (int c = 0; c < n; ++c) {
    s[c] = load(scores + c * kLanes);
    if (task.softcap > 0.0f) s[c] = mul(set1(task.softcap), tanh(div(s[c], set1(task.softcap))));
  }
  if (begin > 0 || end < kKeyTile) {
    const F masked = set1(kNegativeInfinity);
    for (int c = 0; c < n; ++c) {
      const I index = add(iota(), iset1(c * kLanes));
      s[c] = select(less(index, iset1(end)), s[c], masked);
      s[c] = select(less(index, iset1(begin)), masked, s[c]);
    }
  }
  max_out = reduce_max(max(max(s[0], s[1]), max(s[2], s[3])));
  for (int c = 0; c < n; ++c) {
    s[c] = exp(sub(s[c], set1(max_out)));
    store(scores + c * kLanes, s[c]);
  }
  sum_out = reduce_add(add(add(s[0], s[1]), add(s[2], s[3])));
}

// Adds n rows' tiles (max, sum, values at out + r * stride) to their running state.
SIMD void merge_rows(int n, int padded, const float* tile_max, const float* tile_sum, const float* tile_acc,
                     int tile_stride, float* max, float* sum, float* acc) {
  alignas(64) float old_shift[kLanes] = {}, new_shift[kLanes] = {}, old_factor[kLanes], new_factor[kLanes];
  for (int r = 0; r < n; ++r) {
    if (tile_max[r] == kNegativeInfinity) continue;
    const float both = max[r] > tile_max[r] ? max[r] : tile_max[r];
    old_shift[r] = max[r] - both;
    new_shift[r] = tile_max[r] - both;
    max[r] = both;
  }
  store(old_factor, exp(load(old_shift)));
  store(new_factor, exp(load(new_shift)));
  for (int r = 0; r < n; ++r) {
    if (tile_max[r] == kNegativeInfinity) continue;
    sum[r] = sum[r] * old_factor[r] + tile_sum[r] * new_factor[r];
    const F old_f = set1(old_factor[r]), new_f = set1(new_factor[r]);
    for (int i = 0; i < padded; i += kLanes) {
      float* a = acc + r * padded + i;
      store(a, fma(load(tile_acc + r * tile_stride + i), new_f, mul(load(a), old_f)));
    }
  }
}

// R rows of the unit from `row` on against one tile.
template <int R>
static void tile_rows(const AttentionTask& task, const AttentionUnit& unit, AttentionScratch& scratch,
                      const TileView& tile, int row, const int* positions, Ahead& ahead) {
  alignas(64) float scores[R * kKeyTile];
  alignas(64) float acc[R * kMaxHeadDim];
  float tile_max[R], tile_sum[R];
  const int padded = padded_dim(task);
  int end = 0;
  for (int r = 0; r < R; ++r) {
    const RowRange range = row_range(task, tile, positions[row + r]);
    if (range.begin < range.end && range.end > end) end = range.end;
  }
  if (end == 0 && !unit.partials) return;  // the tile lies past these rows, or before their windows
  score_rows<R>(scratch.q + row * task.head_dim, task.head_dim, scratch.keys, scores, ahead);
  for (int r = 0; r < R; ++r) {
    const RowRange range = row_range(task, tile, positions[row + r]);
    if (range.begin < range.end) {
      softmax_row(task, scores + r * kKeyTile, range.begin, range.end, tile_max[r], tile_sum[r]);
    } else {
      for (int j = 0; j < kKeyTile; ++j) scores[r * kKeyTile + j] = 0.0f;
      tile_max[r] = kNegativeInfinity;
      tile_sum[r] = 0.0f;
    }
  }
  int column = 0;
  for (; column + kColTile * kLanes <= padded; column += kColTile * kLanes) {
    value_columns<R, kColTile>(scores, tile, end, column, acc, padded, ahead);
  }
  for (; column < padded; column += kLanes) value_columns<R, 1>(scores, tile, end, column, acc, padded, ahead);
  if (!unit.partials) {
    merge_rows(R, padded, tile_max, tile_sum, acc, padded, scratch.max + row, scratch.sum + row,
               scratch.acc + row * padded);
    return;
  }
  const int num_rows = unit.num_tokens * (task.num_heads / task.num_kv_heads), stride = padded + kRecordHead;
  float* records = unit.partials + (static_cast<int64_t>(tile.first_key / kKeyTile) * num_rows + row) * stride;
  for (int r = 0; r < R; ++r) {
    records[r * stride] = tile_max[r];
    records[r * stride + 1] = tile_sum[r];
    for (int i = 0; i < padded; i += kLanes) store(records + r * stride + kRecordHead + i, load(acc + r * padded + i));
  }
}

static void write_rows(const AttentionTask& task, const AttentionUnit& unit, int num_rows, float* max, float* sum,
                       float* acc) {
  const int ratio = task.num_heads / task.num_kv_heads, padded = padded_dim(task);
  for (int r = 0; r < num_rows; ++r) {
    const int head = unit.kv_head * ratio + r % ratio;
    float factor = 1.0f;
    if (task.sinks) {
      const float sink = task.sinks[head], both = max[r] > sink ? max[r] : sink;
      factor = exp1(max[r] - both);
      sum[r] = sum[r] * factor + exp1(sink - both);
    }
    const F inverse = set1(factor / sum[r]);
    const int64_t token = task.query_start[unit.request] + unit.first_token + r / ratio;
    float* out = task.out + (token * task.num_heads + head) * task.head_dim;
    for (int i = 0; i < task.head_dim; i += kLanes) {
      const int n = task.head_dim - i < kLanes ? task.head_dim - i : kLanes;
      store_upto(out + i, mul(load(acc + r * padded + i), inverse), n);
    }
  }
}

static size_t attention_scratch_floats(const AttentionTask& task, int num_rows) {
  const size_t padded = padded_dim(task);
  return num_rows * (round_up(task.head_dim, kLanes) + padded + 2) + 64 + 2 * padded * kKeyTile;
}

// next: the unit this thread computes after, whose first tile is asked for in time; or null.
static void attention_unit(const AttentionTask& task, const AttentionUnit& unit, const AttentionUnit* next,
                           float* memory) {
  const int ratio = task.num_heads / task.num_kv_heads, padded = padded_dim(task);
  const int num_rows = unit.num_tokens * ratio;
  AttentionScratch scratch;
  scratch.keys = memory;
  scratch.values = scratch.keys + padded * kKeyTile;
  scratch.acc = scratch.values + padded * kKeyTile;
  scratch.q = scratch.acc + num_rows * padded;
  scratch.max = scratch.q + num_rows * padded;
  scratch.sum = scratch.max + num_rows;
  int positions[kMaxUnitRows];
  for (int r = 0; r < num_rows; ++r) {
    const int token = unit.first_token + r / ratio, head = unit.kv_head * ratio + r % ratio;
    positions[r] = query_position(task, unit, token);
    const int64_t row = static_cast<int64_t>(task.query_start[unit.request] + token) * task.num_heads + head;
    for (int i = 0; i < task.head_dim; ++i) {
      scratch.q[r * task.head_dim + i] = task.q[row * task.head_dim + i] * task.scale;
    }
    scratch.max[r] = kNegativeInfinity;
    scratch.sum[r] = 0.0f;
    for (int i = 0; i < padded; i += kLanes) store(scratch.acc + r * padded + i, zero());
  }
  const int row_bytes = task.head_dim * (task.cache_type == kF32 ? 4 : 2);
  TileView tiles[2];
  find_tile(task, unit, unit.first_tile, tiles[unit.first_tile % 2]);
  for (int index = unit.first_tile; index < unit.end_tile; ++index) {
    TileView &tile = tiles[index % 2], &next_tile = tiles[(index + 1) % 2];
    const bool is_last = index + 1 == unit.end_tile;
    if (!is_last) find_tile(task, unit, index + 1, next_tile);
    if (is_last && next) find_tile(task, *next, next->first_tile, next_tile);
    Ahead ahead = {is_last && !next ? nullptr : &next_tile, task.stride_kv, row_bytes};
    if (task.cache_type == kF32) load_tile<kF32>(task, tile, scratch);
    if (task.cache_type == kF16) load_tile<kF16>(task, tile, scratch);
    if (task.cache_type == kBF16) load_tile<kBF16>(task, tile, scratch);
    int row = 0;
    for (; row + kRowTile <= num_rows; row += kRowTile)
      tile_rows<kRowTile>(task, unit, scratch, tile, row, positions, ahead);
    for (; row + 3 <= num_rows; row += 3) tile_rows<3>(task, unit, scratch, tile, row, positions, ahead);
    if (row + 2 <= num_rows) tile_rows<2>(task, unit, scratch, tile, row, positions, ahead), row += 2;
    if (row < num_rows) tile_rows<1>(task, unit, scratch, tile, row, positions, ahead);
    ahead.lines(kKeyTile * kMaxHeadDim);  // what is left
  }
  if (!unit.partials) write_rows(task, unit, num_rows, scratch.max, scratch.sum, scratch.acc);
}

// Merges the records of tiles [first_tile, end_tile) that parts of a unit have left, in order, and writes the rows.
static void attention_merge(const AttentionTask& task, const AttentionUnit& unit, float* memory) {
  const int num_rows = unit.num_tokens * (task.num_heads / task.num_kv_heads);
  const int padded = padded_dim(task), stride = padded + kRecordHead;
  float *acc = memory, *max = acc + num_rows * padded, *sum = max + num_rows;
  for (int r = 0; r < num_rows; ++r) {
    max[r] = kNegativeInfinity;
    sum[r] = 0.0f;
    for (int i = 0; i < padded; i += kLanes) store(acc + r * padded + i, zero());
    for (int index = unit.first_tile; index < unit.end_tile; ++index) {
      const float* record = unit.partials + (static_cast<int64_t>(index) * num_rows + r) * stride;
      merge_rows(1, padded, record, record + 1, record + kRecordHead, stride, max + r, sum + r, acc + r * padded);
    }
  }
  write_rows(task, unit, num_rows, max, sum, acc);
}
