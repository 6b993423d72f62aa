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

template <int TYPE>
SIMD PackedChunk packed_chunk(const PanelTask& task, int panel, int begin) {
  const uint8_t* meta = task.panels + panel * task.panel_stride;
  const int total = task.k / kBlock, end = begin + kDotChunk / kBlock;
  return {meta, meta + meta_bytes_per_panel(TYPE, task.k), begin, end < total ? end : total};
}

// Four bytes a lane become exact small integers; the tile needs them unsigned or signed as kSignedBytes says.
template <int TYPE>
SIMD void unpack_for_dot(const PackedChunk& chunk, const PackedChunk& next, uint8_t* bytes, float* scale,
                         float* addend) {
  constexpr TypeInfo info = type_info(TYPE);
  constexpr int sub_per_block = kBlock / info.sub_block;
  for (int b = chunk.begin; b < chunk.end; ++b) {
    prefetch_block<TYPE>(next.meta, next.planes, next.begin + b - chunk.begin);
    I w[8];
    block_quants<TYPE>(chunk.planes, b, w);
    for (int g = 0; g < 8; ++g) {
      if constexpr (info.bits == 8 && !kSignedBytes) w[g] = bit_xor(w[g], iset1(static_cast<int32_t>(0x80808080u)));
      istore(bytes + 64 * g, w[g]);
    }
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

// What a tile reads besides the rows: one chunk of an unpacked panel.
struct DotChunk {
  const uint8_t* bytes;
  const float* scale;
  const float* addend;
  int first_block;
  int num_blocks;
};

template <int TYPE, int R>
static void dot_tile(const DotChunk& chunk, const QuantizedRows& rows, int row, float* acc_in_out) {
  constexpr TypeInfo info = type_info(TYPE);
  constexpr int groups = info.sub_block / 4, sub_per_block = kBlock / info.sub_block;
  constexpr bool is_signed = info.bits == 8 && kSignedBytes;
  const size_t tile_rows = rows.rows, in_tile = row % rows.rows, tile = row / rows.rows * tile_rows * rows.num_blocks;
  const size_t block_at = tile + chunk.first_block * tile_rows + in_tile;
  const size_t sub_at = (tile + chunk.first_block * tile_rows) * sub_per_block + in_tile;
  const int num_sub = chunk.num_blocks * sub_per_block;
  for (int slice = 0; slice < kSlices; ++slice) {
    const int8_t* q = rows.q + block_at * kBlock;
    const float* x_scale = rows.scale + block_at;
    const float* x_sum = (sub_per_block == 1 ? rows.scaled_sum : rows.scaled_sum16) + sub_at;
    const int32_t* x_negative_sum = (sub_per_block == 1 ? rows.negative_sum : rows.negative_sum16) + sub_at;
    SliceF acc[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = slice_load(acc_in_out + r * kLanes + slice * kSliceLanes);
    for (int s = 0; s < num_sub; ++s) {
      SliceI w[groups];
      for (int g = 0; g < groups; ++g)
        w[g] = slice_bytes(chunk.bytes + (s * groups + g) * 64 + slice * kSliceLanes * 4);
      const SliceF w_scale = slice_load(chunk.scale + s * kLanes + slice * kSliceLanes);
      const SliceF w_addend =
          info.has_min ? slice_load(chunk.addend + s * kLanes + slice * kSliceLanes) : slice_set1(0.0f);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        SliceI start = slice_iset1(0);
        if constexpr (!info.has_min && !is_signed) {
          start = slice_shift_left<info.offset_bits>(slice_iset1(x_negative_sum[r]));
        }
        const SliceI dot = slice_dot<info.bits, groups>(start, w, q + r * kBlock);
        acc[r] = slice_fma(slice_to_float(dot), slice_mul(w_scale, slice_set1(x_scale[r])), acc[r]);
        if constexpr (info.has_min) acc[r] = slice_fma(w_addend, slice_set1(x_sum[r]), acc[r]);
      }
      const bool block_ends = sub_per_block == 1 || s % 2 == 1;
      q += block_ends ? tile_rows * kBlock - (sub_per_block - 1) * info.sub_block : info.sub_block;
      x_scale += block_ends ? tile_rows : 0;
      x_sum += tile_rows;
      x_negative_sum += tile_rows;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) slice_store(acc_in_out + r * kLanes + slice * kSliceLanes, acc[r]);
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
  for (; row + kDotRows <= task.num_rows; row += kDotRows) {
    dot_rows<TYPE, kDotRows>(chunk, rows, row, task, panel);
  }
  if constexpr (kDotRows > 8) {
    if (row + 8 <= task.num_rows) dot_rows<TYPE, 8>(chunk, rows, row, task, panel), row += 8;
  }
  if constexpr (kDotRows > 4) {
    if (row + 4 <= task.num_rows) dot_rows<TYPE, 4>(chunk, rows, row, task, panel), row += 4;
  }
  if (row + 2 <= task.num_rows) dot_rows<TYPE, 2>(chunk, rows, row, task, panel), row += 2;
  if (row < task.num_rows) dot_rows<TYPE, 1>(chunk, rows, row, task, panel);
}

template <int TYPE>
static void dot_panels(const PanelTask& task, const QuantizedRows& rows) {
  constexpr int sub_per_block = kBlock / type_info(TYPE).sub_block;
  uint8_t* bytes = static_cast<uint8_t*>(unpacked_weights(task));
  float* scale = reinterpret_cast<float*>(bytes + kDotChunk * kLanes);
  float* addend = scale + kDotChunk / kBlock * sub_per_block * kLanes;
  PackedChunk chunk = packed_chunk<TYPE>(task, 0, 0);
  for (int panel = 0; panel < task.num_panels;) {
    const bool is_last = chunk.end * kBlock == task.k;
    const PackedChunk next = packed_chunk<TYPE>(task, panel + is_last, is_last ? 0 : chunk.end);
    unpack_for_dot<TYPE>(chunk, next, bytes, scale, addend);
    dot_all_rows<TYPE>({bytes, scale, addend, chunk.begin, chunk.end - chunk.begin}, rows, task, panel);
    panel += is_last;
    chunk = next;
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
