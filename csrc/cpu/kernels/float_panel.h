// Any weights times float32 activations: panels are widened to float32 tiles in the first-level cache, columns in
// order.
//
// An output is acc = fma(x[k], w[k], acc) for k = 0, 1, ...: one chain, whatever the tile, so that a row gives the same
// bits alone and in any batch. Included by isa.cpp.
#pragma once

#include "blocks.h"

// A leftover panel goes in steps of 4 rows, which must not straddle tiles.
static_assert(kGemmRows % 4 == 0 || kGemmPanels == 1);

// Columns [begin, end) of one panel: multiples of 32 for quantized types.
struct PanelColumns {
  const uint8_t* panel;
  int begin;
  int end;
};

// Column 4 g + j of a block: quant j of group g, as the formats define its value.
template <int TYPE>
SIMD F widen(const I w[8], int g, int j, const F scales[2], const F addends[2]) {
  constexpr TypeInfo info = type_info(TYPE);
  constexpr int groups_per_scale = info.sub_block / 4;
  const I word = info.bits == 8 ? bit_xor(w[g], iset1(static_cast<int32_t>(0x80808080u))) : w[g];
  const F quant = to_float(bit_and(shift_right(word, 8 * j), iset1(255)));
  const F scale = scales[g / groups_per_scale];
  if constexpr (info.has_min) return fma(quant, scale, addends[g / groups_per_scale]);
  return mul(sub(quant, set1(static_cast<float>(1 << info.offset_bits))), scale);
}

// Widens them to float32 [column][16], and asks for the lines of what will be widened next (see prefetch_block).
template <int TYPE>
SIMD void unpack_for_float(const PanelColumns& now, const PanelColumns& next, int k, float* out) {
  constexpr TypeInfo info = type_info(TYPE);
  if constexpr (is_plain(TYPE)) {
    constexpr int column_bytes = kLanes * info.bits / 8;
    const uint8_t *from = now.panel + static_cast<size_t>(now.begin) * column_bytes,
                  *ahead = next.panel + static_cast<size_t>(next.begin) * column_bytes;
    for (int i = 0; i < now.end - now.begin; ++i) {
      __builtin_prefetch(ahead + i * column_bytes);
      const uint16_t* halves = reinterpret_cast<const uint16_t*>(from + i * column_bytes);
      if constexpr (TYPE == kF32) store(out + i * kLanes, load(reinterpret_cast<const float*>(halves)));
      if constexpr (TYPE == kF16) store(out + i * kLanes, load_f16(halves));
      if constexpr (TYPE == kBF16) store(out + i * kLanes, as_float(shift_left(load_u16(halves), 16)));
    }
  } else {
    const uint8_t *planes = now.panel + meta_bytes_per_panel(TYPE, k),
                  *ahead = next.panel + meta_bytes_per_panel(TYPE, k);
    for (int b = now.begin / kBlock; b < now.end / kBlock; ++b) {
      prefetch_block<TYPE>(next.panel, ahead, (next.begin - now.begin) / kBlock + b);
      I w[8];
      block_quants<TYPE>(planes, b, w);
      F scales[2], addends[2];
      block_scales<TYPE>(now.panel, b, scales, addends);
      for (int g = 0; g < 8; ++g)
        for (int j = 0; j < 4; ++j) store(out + (4 * g + j) * kLanes, widen<TYPE>(w, g, j, scales, addends));
      out += kBlock * kLanes;
    }
  }
}

// R rows times P unpacked panels over a chunk of columns; sums start from, and go back to, acc[r][p][16].
template <int R, int P>
static void float_tile(const float* x, int tile_rows, const float* w, size_t w_stride, int columns, float* acc) {
  F sum[R][P];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) sum[r][p] = load(acc + (r * P + p) * kLanes);
  for (int i = 0; i < columns; ++i) {
    F column[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) column[p] = load(w + p * w_stride + i * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F value = set1(x[i * tile_rows + r]);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) sum[r][p] = fma(value, column[p], sum[r][p]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) store(acc + (r * P + p) * kLanes, sum[r][p]);
}

struct FloatChunk {
  const float* w;
  size_t w_stride;
  int begin;
  int columns;
  bool is_first;
  bool is_last;
};

template <int R, int P>
static void float_rows(const FloatChunk& chunk, const PanelTask& task, int panel, const FloatRows& rows, int row) {
  float* sums = running_sums(task) + row * P * kLanes;
  if (chunk.is_first)
    for (int i = 0; i < R * P; ++i) store(sums + i * kLanes, zero());
  const float* x = rows.at(task.first_row + row, task.k) + chunk.begin * rows.rows;
  float_tile<R, P>(x, rows.rows, chunk.w, chunk.w_stride, chunk.columns, sums);
  if (chunk.is_last) finish_rows(task, panel, P, row, R, sums);
}

template <int P>
static void float_all_rows(const FloatChunk& chunk, const PanelTask& task, int panel, const FloatRows& rows) {
  int row = 0;
  if constexpr (P == kGemmPanels) {
    for (; row + kGemmRows <= task.num_rows; row += kGemmRows) {
      float_rows<kGemmRows, P>(chunk, task, panel, rows, row);
    }
  }
  for (; row + 4 <= task.num_rows; row += 4) float_rows<4, P>(chunk, task, panel, rows, row);
  if (row + 2 <= task.num_rows) float_rows<2, P>(chunk, task, panel, rows, row), row += 2;
  if (row < task.num_rows) float_rows<1, P>(chunk, task, panel, rows, row);
}

// Panels in groups of P over chunks of columns; what is left of a group goes one by one.
template <int TYPE, int P>
static void float_panel_groups(const PanelTask& task, const FloatRows& rows, int chunk_columns) {
  float* w = static_cast<float*>(unpacked_weights(task));
  const size_t w_stride = static_cast<size_t>(chunk_columns) * kLanes;
  const auto columns = [&](int panel, int begin) __attribute__((always_inline)) {
    const int end = begin + chunk_columns < task.k ? begin + chunk_columns : task.k;
    return PanelColumns{task.panels + panel * task.panel_stride, begin, end};
  };
  for (int panel = 0, begin = 0; panel < task.num_panels;) {
    const bool whole = panel + P <= task.num_panels;
    const int count = whole ? P : 1;
    PanelColumns now = columns(panel, begin);
    const bool is_last = now.end == task.k;
    for (int p = 0; p < count; ++p) {
      now = columns(panel + p, begin);
      const PanelColumns next = is_last ? columns(panel + p + count, 0) : columns(panel + p, now.end);
      unpack_for_float<TYPE>(now, next, task.k, w + p * w_stride);
    }
    const FloatChunk chunk = {w, w_stride, begin, now.end - begin, begin == 0, is_last};
    whole ? float_all_rows<P>(chunk, task, panel, rows) : float_all_rows<1>(chunk, task, panel, rows);
    panel += is_last ? count : 0;
    begin = is_last ? 0 : now.end;
  }
}

// One row times quantized panels, straight from the packed bits. P panels side by side: P chains of sums.
template <int TYPE, int P>
static void float_one_row(const PanelTask& task, const float* x, int panel) {
  const size_t planes_at = meta_bytes_per_panel(TYPE, task.k);
  const uint8_t* meta = task.panels + panel * task.panel_stride;
  F sum[P];
  for (int p = 0; p < P; ++p) sum[p] = zero();
  for (int b = 0; b < task.k / kBlock; ++b, x += kBlock) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const uint8_t *now = meta + p * task.panel_stride, *next = now + P * task.panel_stride;
      prefetch_block<TYPE>(next, next + planes_at, b);
      I w[8];
      F scales[2], addends[2];
      block_quants<TYPE>(now + planes_at, b, w);
      block_scales<TYPE>(now, b, scales, addends);
      for (int g = 0; g < 8; ++g)
        for (int j = 0; j < 4; ++j) sum[p] = fma(set1(x[4 * g + j]), widen<TYPE>(w, g, j, scales, addends), sum[p]);
    }
  }
  float* sums = running_sums(task);
  for (int p = 0; p < P; ++p) store(sums + p * kLanes, sum[p]);
  finish_rows(task, panel, P, 0, 1, sums);
}

template <int TYPE>
static void float_panels(const PanelTask& task, const FloatRows& rows) {
  if constexpr (!is_plain(TYPE)) {
    if (task.num_rows == 1 && rows.rows == 1) {
      int panel = 0;
      for (; panel + 4 <= task.num_panels; panel += 4) float_one_row<TYPE, 4>(task, rows.x, panel);
      for (; panel < task.num_panels; ++panel) float_one_row<TYPE, 1>(task, rows.x, panel);
      return;
    }
  }
  if (task.num_rows <= 4) {
    // Few rows: more panels side by side, so that enough independent sums hide the latency of one chain.
    float_panel_groups<TYPE, 4>(task, rows, 64);
  } else {
    float_panel_groups<TYPE, kGemmPanels>(task, rows, 256);
  }
}
