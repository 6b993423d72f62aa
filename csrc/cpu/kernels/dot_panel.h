// Quantized weights times 8-bit activations: exact integer dot products over each sub-block, then float sums over them.
//
// A panel is first unpacked, some columns at a time, into bytes and float scales in the first-level cache; tiles of
// rows then run over that. An output is, for sub-blocks s in order, with x the row's 8-bit blocks:
//   acc = fma(float(dot(w, x) exact), w_scale * x_scale, acc);  with minimums also  acc = fma(w_min, x_scaled_sum, acc)
// whatever the tile, so that a row gives the same bits alone and in any batch. Included by isa.cpp.
#pragma once

#include "blocks.h"

constexpr int kDotChunk = 1024;  // columns unpacked at a time: 16 KiB of bytes, at most 8 KiB of scales

// Four bytes a lane become exact small integers; the tile needs them unsigned or signed as kSignedBytes says.
template <int TYPE>
SIMD void unpack_for_dot(const uint8_t* meta, const uint8_t* planes, int begin, int end, uint8_t* bytes, float* scale,
                         float* addend) {
  constexpr TypeInfo info = type_info(TYPE);
  constexpr int sub_per_block = kBlock / info.sub_block;
  for (int b = begin; b < end; ++b) {
    I w[8];
    block_quants<TYPE>(planes, b, w);
    for (int g = 0; g < 8; ++g) {
      if constexpr (info.bits == 8 && !kSignedBytes) w[g] = bit_xor(w[g], iset1(static_cast<int32_t>(0x80808080u)));
      istore(bytes + 64 * g, w[g]);
    }
    F scales[2], addends[2];
    block_scales<TYPE>(meta, b, scales, addends);
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
  int total_blocks;
};

template <int TYPE, int R>
static void dot_tile(const DotChunk& chunk, const QuantizedRows& rows, int row, float* acc_in_out) {
  constexpr TypeInfo info = type_info(TYPE);
  constexpr int groups = info.sub_block / 4, sub_per_block = kBlock / info.sub_block;
  constexpr bool is_signed = info.bits == 8 && kSignedBytes;
  const int8_t* q = rows.q + row * rows.q_stride + chunk.first_block * kBlock;
  const float* meta = rows.meta + row * rows.meta_stride;
  const size_t sums_at = sub_per_block == 1 ? chunk.total_blocks : 3 * static_cast<size_t>(chunk.total_blocks);
  const float* x_scale = meta + chunk.first_block;
  const float* x_sum = meta + sums_at + chunk.first_block * sub_per_block;
  const int32_t* x_negative_sum =
      reinterpret_cast<const int32_t*>(x_sum + static_cast<size_t>(chunk.total_blocks) * sub_per_block);
  for (int slice = 0; slice < kSlices; ++slice) {
    SliceF acc[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = slice_load(acc_in_out + r * kLanes + slice * kSliceLanes);
    const int num_sub = chunk.num_blocks * sub_per_block;
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
          start = slice_shift_left<info.offset_bits>(slice_iset1(x_negative_sum[r * rows.meta_stride + s]));
        }
        const SliceI dot = slice_dot<info.bits, groups>(start, w, q + r * rows.q_stride + s * info.sub_block);
        const SliceF both = slice_mul(w_scale, slice_set1(x_scale[r * rows.meta_stride + s / sub_per_block]));
        acc[r] = slice_fma(slice_to_float(dot), both, acc[r]);
        if constexpr (info.has_min) acc[r] = slice_fma(w_addend, slice_set1(x_sum[r * rows.meta_stride + s]), acc[r]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) slice_store(acc_in_out + r * kLanes + slice * kSliceLanes, acc[r]);
  }
}

template <int TYPE, int R>
static void dot_rows(const DotChunk& chunk, const QuantizedRows& rows, int row, const PanelTask& task, int panel,
                     bool is_first, bool is_last) {
  alignas(64) float acc[R * kLanes];
  const int columns = task.num_columns - panel * kLanes < kLanes ? task.num_columns - panel * kLanes : kLanes;
  float* y = task.y + panel * kLanes + row * task.y_stride;
  for (int r = 0; r < R; ++r) store(acc + r * kLanes, is_first ? zero() : load_first(y + r * task.y_stride, columns));
  dot_tile<TYPE, R>(chunk, rows, row, acc);
  const F bias = is_last && task.bias ? load_first(task.bias + panel * kLanes, columns) : zero();
  for (int r = 0; r < R; ++r) {
    F sum = load(acc + r * kLanes);
    if (is_last && task.bias) sum = add(sum, bias);
    store_first(y + r * task.y_stride, sum, columns);
  }
}

template <int TYPE>
static void dot_panels(const PanelTask& task, const QuantizedRows& rows) {
  constexpr int sub_per_block = kBlock / type_info(TYPE).sub_block;
  uint8_t* bytes = static_cast<uint8_t*>(task.scratch);
  float* scale = reinterpret_cast<float*>(bytes + kDotChunk * kLanes);
  float* addend = scale + kDotChunk / kBlock * sub_per_block * kLanes;
  const int total_blocks = task.k / kBlock;
  for (int p = 0; p < task.num_panels; ++p) {
    const uint8_t* panel = task.panels + p * task.panel_stride;
    const uint8_t* planes = panel + meta_bytes_per_panel(TYPE, task.k);
    for (int begin = 0; begin < total_blocks; begin += kDotChunk / kBlock) {
      const int end = begin + kDotChunk / kBlock < total_blocks ? begin + kDotChunk / kBlock : total_blocks;
      unpack_for_dot<TYPE>(panel, planes, begin, end, bytes, scale, addend);
      const DotChunk chunk = {bytes, scale, addend, begin, end - begin, total_blocks};
      const bool first = begin == 0, last = end == total_blocks;
      int row = 0;
      for (; row + kDotRows <= task.num_rows; row += kDotRows) {
        dot_rows<TYPE, kDotRows>(chunk, rows, row, task, p, first, last);
      }
      if constexpr (kDotRows > 8) {
        if (row + 8 <= task.num_rows) dot_rows<TYPE, 8>(chunk, rows, row, task, p, first, last), row += 8;
      }
      if constexpr (kDotRows > 4) {
        if (row + 4 <= task.num_rows) dot_rows<TYPE, 4>(chunk, rows, row, task, p, first, last), row += 4;
      }
      if (row + 2 <= task.num_rows) dot_rows<TYPE, 2>(chunk, rows, row, task, p, first, last), row += 2;
      if (row < task.num_rows) dot_rows<TYPE, 1>(chunk, rows, row, task, p, first, last);
    }
  }
}

// A row of floats to 8 bits: each block of 32 by its largest magnitude / 127, rounded to nearest (ties to even).
static void quantize_row(const float* x, int k, int8_t* q, float* meta) {
  const int num_blocks = k / kBlock;
  float* scaled_sum = meta + num_blocks;
  int32_t* negative_sum = reinterpret_cast<int32_t*>(scaled_sum + num_blocks);
  float* scaled_sum16 = scaled_sum + 2 * num_blocks;
  int32_t* negative_sum16 = reinterpret_cast<int32_t*>(scaled_sum16 + 2 * num_blocks);
  for (int b = 0; b < num_blocks; ++b) {
    const F x0 = load(x + b * kBlock), x1 = load(x + b * kBlock + kLanes);
    const float largest = reduce_max(max(abs(x0), abs(x1)));
    const float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    const I q0 = round_to_int(mul(x0, set1(inverse))), q1 = round_to_int(mul(x1, set1(inverse)));
    store_low_s8(q + b * kBlock, q0);
    store_low_s8(q + b * kBlock + kLanes, q1);
    const int32_t sum0 = reduce_add(q0), sum1 = reduce_add(q1);
    meta[b] = scale;
    scaled_sum[b] = scale * static_cast<float>(sum0 + sum1);
    negative_sum[b] = -(sum0 + sum1);
    scaled_sum16[2 * b] = scale * static_cast<float>(sum0);
    scaled_sum16[2 * b + 1] = scale * static_cast<float>(sum1);
    negative_sum16[2 * b] = -sum0;
    negative_sum16[2 * b + 1] = -sum1;
  }
}
