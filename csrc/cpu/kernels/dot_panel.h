// Quantized weights times 8-bit activations: exact integer dot products over each sub-block, then float sums over them.
//
// A panel is first unpacked, some columns at a time, into bytes and float scales in the first-level cache; tiles of
// rows then run over that. An output is, for sub-blocks s in order, with x the row's 8-bit blocks:
//   acc = fma(float(dot(w, x) exact), w_scale * x_scale, acc);  with minimums also  acc = fma(w_min, x_scaled_sum, acc)
// whatever the tile, so that a row gives the same bits alone and in any batch. Included by isa.cpp.
#pragma once

#include "blocks.h"

constexpr int kDotChunk = 1024;  // columns unpacked at a time: 16 KiB of bytes, at most 8 KiB of scales

// A part of a panel's columns, and where its meta and planes lie.
struct PackedChunk {
  const uint8_t* meta;
  const uint8_t* planes;
  int begin;  // blocks
  int end;
};

// The chunk of a panel that begins at a block; K is cut evenly.
template <int TYPE>
SIMD PackedChunk packed_chunk(const PanelTask& task, int panel, int begin) {
  const uint8_t* meta = task.panels + panel * task.panel_stride;
  const int total = task.k / kBlock, count = (task.k + kDotChunk - 1) / kDotChunk;
  const int end = begin + (total + count - 1) / count;
  return {meta, meta + meta_bytes_per_panel(TYPE, task.k), begin, end < total ? end : total};
}

// A chunk of a panel, unpacked.
template <int TYPE>
struct UnpackedPanel {
  static constexpr int num_sub = kDotChunk / type_info(TYPE).sub_block;
  uint8_t bytes[kDotChunk * kLanes];
  float scale[num_sub * kLanes];
  float addend[type_info(TYPE).has_min ? num_sub * kLanes : 1];
};

// A block's quants as the integer tile needs them: unsigned, unless it takes 8-bit ones as they are.
template <int TYPE>
SIMD void unsigned_quants(const uint8_t* planes, int b, I w[8]) {
  block_quants<TYPE>(planes, b, w);
  if constexpr (type_info(TYPE).bits == 8 && !kSignedBytes) {
    for (int g = 0; g < 8; ++g) w[g] = bit_xor(w[g], iset1(static_cast<int32_t>(0x80808080u)));
  }
}

// A chunk's bytes and scales to the first-level cache.
template <int TYPE>
SIMD void unpack_for_dot(const PackedChunk& chunk, const PackedChunk& next, UnpackedPanel<TYPE>& out) {
  uint8_t* bytes = out.bytes;
  float *scale = out.scale, *addend = out.addend;
  constexpr TypeInfo info = type_info(TYPE);
  constexpr int sub_per_block = kBlock / info.sub_block;
  for (int b = chunk.begin; b < chunk.end; ++b) {
    prefetch_block<TYPE>(next.meta, next.planes, next.begin + b - chunk.begin);
    I w[8];
    unsigned_quants<TYPE>(chunk.planes, b, w);
    for (int g = 0; g < 8; ++g) istore(bytes + 64 * g, w[g]);
    F scales[2], addends[2];
    block_scales<TYPE>(chunk.meta, b, scales, addends);
    for (int i = 0; i < sub_per_block; ++i) {
      store(scale + kLanes * i, scales[i]);
      if constexpr (info.has_min) store(addend + kLanes * i, addends[i]);
    }
    bytes += 64 * 8;
    scale += kLanes * sub_per_block;
    addend += kLanes * sub_per_block;
  }
}

// What a tile reads besides the rows.
struct DotChunk {
  const uint8_t* bytes;
  const float* scale;
  const float* addend;
  int first_block;
  int num_blocks;
};

// acc[r] += the r-th row's sub-block, whose exact integer sum is given, by its scales.
template <int TYPE>
SIMD void add_scaled(SliceF& acc, SliceI dot, SliceF w_scale, SliceF w_addend, const float* x_scale,
                     const float* x_sum) {
  acc = slice_fma(slice_to_float(dot), slice_mul(w_scale, slice_set1(*x_scale)), acc);
  if constexpr (type_info(TYPE).has_min) acc = slice_fma(w_addend, slice_set1(*x_sum), acc);
}

// What an integer sum starts from: minus the offset that the unsigned quants carry, times the sum of x.
template <int TYPE>
SIMD SliceI dot_start(int32_t x_negative_sum) {
  constexpr TypeInfo info = type_info(TYPE);
  if constexpr (info.has_min || (info.bits == 8 && kSignedBytes)) return slice_iset1(0);
  return slice_shift_left<info.offset_bits>(slice_iset1(x_negative_sum));
}

// Where a tile's rows lie from a row and block on, and the steps to the next sub-block.
template <int TYPE>
struct RowCursor {
  static constexpr int sub_block = type_info(TYPE).sub_block, sub_per_block = kBlock / sub_block;
  const int8_t* q;
  const float* x_scale;
  const float* x_sum;
  const int32_t* x_negative_sum;
  size_t tile_rows;

  __attribute__((always_inline)) RowCursor(const QuantizedRows& rows, int row, int block) : tile_rows(rows.rows) {
    const size_t tile = row / rows.rows * tile_rows * rows.num_blocks + block * tile_rows, in_tile = row % rows.rows;
    q = rows.q + (tile + in_tile) * kBlock;
    x_scale = rows.scale + tile + in_tile;
    x_sum = (sub_per_block == 1 ? rows.scaled_sum : rows.scaled_sum16) + tile * sub_per_block + in_tile;
    x_negative_sum = (sub_per_block == 1 ? rows.negative_sum : rows.negative_sum16) + tile * sub_per_block + in_tile;
  }

  // From sub-block `s` of a block to the next one.
  __attribute__((always_inline)) void step(int s) {
    const bool block_ends = s == sub_per_block - 1;
    q += block_ends ? tile_rows * kBlock - (sub_per_block - 1) * sub_block : sub_block;
    x_scale += block_ends ? tile_rows : 0;
    x_sum += tile_rows;
    x_negative_sum += tile_rows;
  }
};

#if SONAR_ROWS_TOGETHER
// The rows' running sums stay in memory: the registers are for the integer sums, which are touched eight times as
// often.
template <int R>
struct AccRows {
  float* memory;
  __attribute__((always_inline)) explicit AccRows(float* p) : memory(p) {}
  __attribute__((always_inline)) void store_to(float*) const {}
};

// One sub-block of R rows, its groups' bytes in memory.
template <int TYPE, int R>
SIMD void dot_sub_block(AccRows<R>& acc, const uint8_t* bytes, SliceF w_scale, SliceF w_addend,
                        const RowCursor<TYPE>& x) {
  constexpr TypeInfo info = type_info(TYPE);
  SliceI dots[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) dots[r] = dot_start<TYPE>(x.x_negative_sum[r]);
  rows_dot<info.bits, info.sub_block / 4, R>(dots, bytes, x.q);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    SliceF sum = slice_load(acc.memory + r * kLanes);
    add_scaled<TYPE>(sum, dots[r], w_scale, w_addend, x.x_scale + r, x.x_sum + r);
    slice_store(acc.memory + r * kLanes, sum);
  }
}
#else
// The rows' running sums, in registers.
template <int R>
struct AccRows {
  SliceF sum[R];
  __attribute__((always_inline)) AccRows() {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[r] = slice_set1(0.0f);
  }
  __attribute__((always_inline)) explicit AccRows(const float* p) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[r] = slice_load(p + r * kLanes);
  }
  __attribute__((always_inline)) void store_to(float* p) const {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) slice_store(p + r * kLanes, sum[r]);
  }
};

// One sub-block of R rows, its groups' bytes in registers, for the lanes of a slice.
template <int TYPE, int R>
SIMD void dot_sub_block(AccRows<R>& acc, const SliceI* w, SliceF w_scale, SliceF w_addend, const RowCursor<TYPE>& x) {
  constexpr TypeInfo info = type_info(TYPE);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const SliceI start = dot_start<TYPE>(x.x_negative_sum[r]);
    const SliceI dot = slice_dot<info.bits, info.sub_block / 4>(start, w, x.q + r * kBlock);
    add_scaled<TYPE>(acc.sum[r], dot, w_scale, w_addend, x.x_scale + r, x.x_sum + r);
  }
}

template <int TYPE, int R>
SIMD void dot_sub_block(AccRows<R>& acc, const uint8_t* bytes, SliceF w_scale, SliceF w_addend,
                        const RowCursor<TYPE>& x) {
  constexpr int groups = type_info(TYPE).sub_block / 4;
  SliceI w[groups];
  for (int g = 0; g < groups; ++g) w[g] = slice_bytes(bytes + g * 64);
  dot_sub_block<TYPE, R>(acc, w, w_scale, w_addend, x);
}
#endif

template <int TYPE, int R>
static void dot_tile(const DotChunk& chunk, const QuantizedRows& rows, int row, float* acc_in_out) {
  constexpr TypeInfo info = type_info(TYPE);
  constexpr int groups = info.sub_block / 4, sub_per_block = kBlock / info.sub_block;
  for (int slice = 0; slice < kSlices; ++slice) {
    const int lane = slice * kSliceLanes;
    RowCursor<TYPE> x(rows, row, chunk.first_block);
    AccRows<R> acc(acc_in_out + lane);
    for (int s = 0; s < chunk.num_blocks * sub_per_block; ++s) {
      const uint8_t* bytes = chunk.bytes + s * groups * 64 + lane * 4;
      const SliceF w_scale = slice_load(chunk.scale + s * kLanes + lane);
      const SliceF w_addend = info.has_min ? slice_load(chunk.addend + s * kLanes + lane) : slice_set1(0.0f);
      dot_sub_block<TYPE, R>(acc, bytes, w_scale, w_addend, x);
      x.step(s % sub_per_block);
    }
    acc.store_to(acc_in_out + lane);
  }
}

template <int TYPE, int R>
static void dot_rows(const DotChunk& chunk, const QuantizedRows& rows, int row, const PanelTask& task, int panel) {
  float* sums = running_sums(task) + row * kLanes;
  if (chunk.first_block == 0)
    for (int r = 0; r < R; ++r) store(sums + r * kLanes, zero());
  dot_tile<TYPE, R>(chunk, rows, task.first_row + row, sums);
  if ((chunk.first_block + chunk.num_blocks) * kBlock == task.k) finish_rows(task, panel, 1, row, R, sums);
}

template <int TYPE>
static void dot_all_rows(const DotChunk& chunk, const QuantizedRows& rows, const PanelTask& task, int panel) {
  int row = 0;
  for (; row + kDotRows <= task.num_rows; row += kDotRows) dot_rows<TYPE, kDotRows>(chunk, rows, row, task, panel);
  if constexpr (kDotRows > 8) {
    if (row + 8 <= task.num_rows) dot_rows<TYPE, 8>(chunk, rows, row, task, panel), row += 8;
  }
  if constexpr (kDotRows > 4) {
    if (row + 4 <= task.num_rows) dot_rows<TYPE, 4>(chunk, rows, row, task, panel), row += 4;
  }
  if (row + 2 <= task.num_rows) dot_rows<TYPE, 2>(chunk, rows, row, task, panel), row += 2;
  if (row < task.num_rows) dot_rows<TYPE, 1>(chunk, rows, row, task, panel);
}

#if SONAR_DIRECT_TILES
// All rows as one tile of R, straight from the packed bits: with so few of them, unpacking to memory and back costs as
// much as the sums. Tiles narrower than R were filled up with zeros.
template <int TYPE, int R>
static void dot_one_tile(const PanelTask& task, const QuantizedRows& rows) {
  constexpr TypeInfo info = type_info(TYPE);
  constexpr int groups = info.sub_block / 4, sub_per_block = kBlock / info.sub_block;
  float* sums = running_sums(task);
  const size_t planes_at = meta_bytes_per_panel(TYPE, task.k);
  for (int panel = 0; panel < task.num_panels; ++panel) {
    const uint8_t *meta = task.panels + panel * task.panel_stride, *planes = meta + planes_at;
    RowCursor<TYPE> x(rows, 0, 0);
    AccRows<R> acc;
    for (int b = 0; b < rows.num_blocks; ++b) {
      prefetch_block<TYPE>(meta + task.panel_stride, planes + task.panel_stride, b);
      I quants[8];
      unsigned_quants<TYPE>(planes, b, quants);
      SliceI w[8];
      for (int g = 0; g < 8; ++g) w[g] = slice_of(quants[g]);
      F scales[2], addends[2];
      block_scales<TYPE>(meta, b, scales, addends);
#pragma GCC unroll 2
      for (int s = 0; s < sub_per_block; ++s) {
        const SliceF addend = info.has_min ? slice_of(addends[s]) : slice_set1(0.0f);
        dot_sub_block<TYPE, R>(acc, w + s * groups, slice_of(scales[s]), addend, x);
        x.step(s);
      }
    }
    acc.store_to(sums);
    finish_rows(task, panel, 1, 0, task.num_rows, sums);
  }
}

#endif

template <int TYPE>
static void dot_panels(const PanelTask& task, const QuantizedRows& rows) {
#if SONAR_DIRECT_TILES
  // 9 to 12 rows are cheaper as tiles of 8 and 4 or less.
  if (task.first_row == 0 && task.num_rows == 1) return dot_one_tile<TYPE, 1>(task, rows);
  if (task.first_row == 0 && task.num_rows == 2) return dot_one_tile<TYPE, 2>(task, rows);
  if (task.first_row == 0 && task.num_rows <= 4) return dot_one_tile<TYPE, 4>(task, rows);
  if (task.first_row == 0 && task.num_rows <= 8) return dot_one_tile<TYPE, 8>(task, rows);
  if (task.first_row == 0 && task.num_rows > 12 && task.num_rows <= 16) return dot_one_tile<TYPE, 16>(task, rows);
#endif
  static_assert(sizeof(UnpackedPanel<TYPE>) <= kPanelScratchBytes - kSumBytes);
  UnpackedPanel<TYPE>& unpacked = *static_cast<UnpackedPanel<TYPE>*>(unpacked_weights(task));
  PackedChunk now = packed_chunk<TYPE>(task, 0, 0);
  for (int panel = 0; panel < task.num_panels;) {
    const bool is_last = now.end * kBlock == task.k;
    const PackedChunk next = packed_chunk<TYPE>(task, panel + is_last, is_last ? 0 : now.end);
    unpack_for_dot<TYPE>(now, next, unpacked);
    const DotChunk chunk = {unpacked.bytes, unpacked.scale, unpacked.addend, now.begin, now.end - now.begin};
    dot_all_rows<TYPE>(chunk, rows, task, panel);
    panel += is_last;
    now = next;
  }
}

// A row of floats to 8 bits: each block of 32 by its largest magnitude / 127, rounded to nearest (ties to even).
static void quantize_row(const float* x, const QuantizedRows& out, int row) {
  const int rows = out.rows, tile = row / rows * rows * out.num_blocks, in_tile = row % rows;
  for (int b = 0; b < out.num_blocks; ++b) {
    const F x0 = load(x + b * kBlock), x1 = load(x + b * kBlock + kLanes);
    const float largest = reduce_max(max(abs(x0), abs(x1)));
    const float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    const I q0 = round_to_int(mul(x0, set1(inverse))), q1 = round_to_int(mul(x1, set1(inverse)));
    const int32_t sum0 = reduce_add(q0), sum1 = reduce_add(q1);
    const size_t at = tile + static_cast<size_t>(b) * rows + in_tile;
    const size_t half0 = 2 * tile + static_cast<size_t>(2 * b) * rows + in_tile, half1 = half0 + rows;
    store_low_s8(out.q + at * kBlock, q0);
    store_low_s8(out.q + at * kBlock + kLanes, q1);
    out.scale[at] = scale;
    out.scaled_sum[at] = scale * static_cast<float>(sum0 + sum1);
    out.negative_sum[at] = -(sum0 + sum1);
    out.scaled_sum16[half0] = scale * static_cast<float>(sum0);
    out.scaled_sum16[half1] = scale * static_cast<float>(sum1);
    out.negative_sum16[half0] = -sum0;
    out.negative_sum16[half1] = -sum1;
  }
}
