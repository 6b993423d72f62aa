// Any weights times float32 activations: panels are widened to float32 tiles in the first-level cache, columns in
// order.
//
// An output is acc = fma(x[k], w[k], acc) for k = 0, 1, ...: one chain, whatever the tile, so that a row gives the same
// bits alone and in any batch. Included by isa.cpp.
#pragma once

#include "blocks.h"

// Columns [begin, end) of one panel as float32 [column][16]. For quantized types both are multiples of 32.
template <int TYPE>
SIMD void unpack_for_float(const uint8_t* panel, int k, int begin, int end, float* out) {
  constexpr TypeInfo info = type_info(TYPE);
  if constexpr (is_plain(TYPE)) {
    for (int i = begin; i < end; ++i) {
      if constexpr (TYPE == kF32) store(out, load(reinterpret_cast<const float*>(panel) + i * kLanes));
      if constexpr (TYPE == kF16) store(out, load_f16(reinterpret_cast<const uint16_t*>(panel) + i * kLanes));
      if constexpr (TYPE == kBF16) {
        store(out, as_float(shift_left(load_u16(reinterpret_cast<const uint16_t*>(panel) + i * kLanes), 16)));
      }
      out += kLanes;
    }
  } else {
    const uint8_t* planes = panel + meta_bytes_per_panel(TYPE, k);
    constexpr int groups_per_scale = info.sub_block / 4;
    for (int b = begin / kBlock; b < end / kBlock; ++b) {
      I w[8];
      block_quants<TYPE>(planes, b, w);
      F scales[2], addends[2];
      block_scales<TYPE>(panel, b, scales, addends);
      for (int g = 0; g < 8; ++g) {
        if constexpr (info.bits == 8) w[g] = bit_xor(w[g], iset1(static_cast<int32_t>(0x80808080u)));
        const F scale = scales[g / groups_per_scale], addend = addends[g / groups_per_scale];
        for (int j = 0; j < 4; ++j) {
          const F quant = to_float(bit_and(shift_right(w[g], 8 * j), iset1(255)));
          F value;
          if constexpr (info.has_min) {
            value = fma(quant, scale, addend);
          } else {
            value = mul(sub(quant, set1(static_cast<float>(1 << info.offset_bits))), scale);
          }
          store(out + (4 * g + j) * kLanes, value);
        }
      }
      out += kBlock * kLanes;
    }
  }
}

// R rows times P unpacked panels over a chunk of columns; sums start from, and go back to, acc[r][p][16].
template <int R, int P>
static void float_tile(const float* x, size_t x_stride, const float* w, size_t w_stride, int columns, float* acc) {
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
      const F value = set1(x[r * x_stride + i]);
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
static void float_rows(const FloatChunk& chunk, const PanelTask& task, int panel, const float* x, size_t x_stride,
                       int row) {
  alignas(64) float acc[R * P * kLanes];
  float* y = task.y + panel * kLanes + row * task.y_stride;
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      const int columns = task.num_columns - (panel + p) * kLanes;
      store(acc + (r * P + p) * kLanes,
            chunk.is_first ? zero()
                           : load_first(y + r * task.y_stride + p * kLanes, columns < kLanes ? columns : kLanes));
    }
  }
  float_tile<R, P>(x + row * x_stride + chunk.begin, x_stride, chunk.w, chunk.w_stride, chunk.columns, acc);
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      int columns = task.num_columns - (panel + p) * kLanes;
      columns = columns < kLanes ? columns : kLanes;
      F sum = load(acc + (r * P + p) * kLanes);
      if (chunk.is_last && task.bias) sum = add(sum, load_first(task.bias + (panel + p) * kLanes, columns));
      store_first(y + r * task.y_stride + p * kLanes, sum, columns);
    }
  }
}

template <int P>
static void float_all_rows(const FloatChunk& chunk, const PanelTask& task, int panel, const float* x, size_t x_stride) {
  int row = 0;
  if constexpr (P == kGemmPanels) {
    for (; row + kGemmRows <= task.num_rows; row += kGemmRows) {
      float_rows<kGemmRows, P>(chunk, task, panel, x, x_stride, row);
    }
  }
  for (; row + 4 <= task.num_rows; row += 4) float_rows<4, P>(chunk, task, panel, x, x_stride, row);
  if (row + 2 <= task.num_rows) float_rows<2, P>(chunk, task, panel, x, x_stride, row), row += 2;
  if (row < task.num_rows) float_rows<1, P>(chunk, task, panel, x, x_stride, row);
}

// Panels in groups of P over chunks of columns; what is left of a group goes one by one.
template <int TYPE, int P>
static void float_panel_groups(const PanelTask& task, const float* x, size_t x_stride, int chunk_columns) {
  float* w = static_cast<float*>(task.scratch);
  const size_t w_stride = static_cast<size_t>(chunk_columns) * kLanes;
  int panel = 0;
  while (panel < task.num_panels) {
    const bool whole = panel + P <= task.num_panels;
    const int count = whole ? P : 1;
    for (int begin = 0; begin < task.k; begin += chunk_columns) {
      const int end = begin + chunk_columns < task.k ? begin + chunk_columns : task.k;
      for (int p = 0; p < count; ++p) {
        unpack_for_float<TYPE>(task.panels + (panel + p) * task.panel_stride, task.k, begin, end, w + p * w_stride);
      }
      const FloatChunk chunk = {w, w_stride, begin, end - begin, begin == 0, end == task.k};
      if (whole) {
        float_all_rows<P>(chunk, task, panel, x, x_stride);
      } else {
        float_all_rows<1>(chunk, task, panel, x, x_stride);
      }
    }
    panel += count;
  }
}

template <int TYPE>
static void float_panels(const PanelTask& task, const float* x, size_t x_stride) {
  if (task.num_rows <= 4) {
    // Few rows: more panels side by side, so that enough independent sums hide the latency of one chain.
    float_panel_groups<TYPE, 4>(task, x, x_stride, 64);
  } else {
    float_panel_groups<TYPE, kGemmPanels>(task, x, x_stride, 256);
  }
}
