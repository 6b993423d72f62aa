// Packed quantized blocks back to numbers: quants as bytes in registers, scales and minimums as floats.
//
// See ../layout.h for the format. Included by isa.cpp after a simd/*.h.
#pragma once

#include "../layout.h"

SIMD I bytes1(int value) { return iset1(value * 0x01010101); }

// The quants of block b: w[g] holds, for each lane, columns 4 g .. 4 g + 3 in its four bytes. Q8_0's stay signed.
template <int TYPE>
SIMD void block_quants(const uint8_t* planes, int b, I w[8]) {
  constexpr int bits = type_info(TYPE).bits;
  const uint8_t* line = planes + static_cast<size_t>(b) * plane_bytes_per_block(TYPE);
  if constexpr (bits == 8) {
    for (int g = 0; g < 8; ++g) w[g] = iload(line + 64 * g);
  } else if constexpr (bits >= 4) {
    const I nibble = bytes1(15);
    for (int j = 0; j < 4; ++j) {
      const I pair = iload(line + 64 * j);
      w[j] = bit_and(pair, nibble);
      w[j + 4] = bit_and(shift_right(pair, 4), nibble);
    }
    if constexpr (bits == 5) {
      const I top = iload(line + 256);
      for (int g = 0; g < 8; ++g) {
        const I aligned = g < 4 ? shift_left(top, 4 - g) : shift_right(top, g - 4);
        w[g] = bit_or(w[g], bit_and(aligned, bytes1(16)));
      }
    } else if constexpr (bits == 6) {
      for (int g = 0; g < 8; ++g) {
        const I top = iload(line + 256 + 64 * (g / 4));
        const int s = g % 4;
        const I aligned = s < 2 ? shift_left(top, 4 - 2 * s) : shift_right(top, 2 * s - 4);
        w[g] = bit_or(w[g], bit_and(aligned, bytes1(48)));
      }
    }
  } else {
    for (int g = 0; g < 8; ++g) w[g] = bit_and(shift_right(iload(line + 64 * (g / 4)), 2 * (g % 4)), bytes1(3));
    if constexpr (bits == 3) {
      const I top = iload(line + 128);
      for (int g = 0; g < 8; ++g) {
        const I aligned = g < 2 ? shift_left(top, 2 - g) : shift_right(top, g - 2);
        w[g] = bit_or(w[g], bit_and(aligned, bytes1(4)));
      }
    }
  }
}

// Scales (and addends, for the types that have minimums) of block b: one of each, or two where 16 columns share one.
template <int TYPE>
SIMD void block_scales(const uint8_t* meta, int b, F scale[2], F addend[2]) {
  constexpr TypeInfo info = type_info(TYPE);
  constexpr int blocks_per_super = info.super_block / kBlock;
  const uint8_t* super = meta + static_cast<size_t>(b / blocks_per_super) * meta_bytes_per_super_block(TYPE);
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(super);
  const F d = load_f16(halves);
  F m = zero();
  if constexpr (info.has_min) m = load_f16(halves + kLanes);
  if constexpr (info.super_block == kBlock) {
    scale[0] = d;
    addend[0] = m;
    return;
  }
  constexpr int num_sub = info.super_block / info.sub_block, sub_per_block = kBlock / info.sub_block;
  const uint8_t* scales = super + (info.has_min ? 2 : 1) * kLanes * 2;
  for (int i = 0; i < sub_per_block; ++i) {
    const int sub_index = b % blocks_per_super * sub_per_block + i;
    const uint8_t* at = scales + sub_index * kLanes;
    if constexpr (TYPE == kQ2_K) {
      const I both = load_u8(at);
      scale[i] = mul(d, to_float(bit_and(both, iset1(15))));
      addend[i] = sub(zero(), mul(m, to_float(shift_right(both, 4))));
    } else if constexpr (info.has_min) {
      scale[i] = mul(d, to_float(load_u8(at)));
      addend[i] = sub(zero(), mul(m, to_float(load_u8(at + num_sub * kLanes))));
    } else {
      scale[i] = mul(d, to_float(load_s8(reinterpret_cast<const int8_t*>(at))));
    }
  }
}

// Asks for the lines of a block that will be unpacked after the current chunk: with sums and loads taking turns, the
// hardware's own prefetching leaves memory idle half of the time (measured: 10 against 33 GB/s a core).
template <int TYPE>
SIMD void prefetch_block(const uint8_t* meta, const uint8_t* planes, int b) {
  constexpr int blocks_per_super = type_info(TYPE).super_block / kBlock;
  const uint8_t* line = planes + static_cast<size_t>(b) * plane_bytes_per_block(TYPE);
  for (int at = 0; at < plane_bytes_per_block(TYPE); at += 64) __builtin_prefetch(line + at);
  if (b % blocks_per_super == 0) {
    const uint8_t* super = meta + static_cast<size_t>(b / blocks_per_super) * meta_bytes_per_super_block(TYPE);
    for (int at = 0; at < meta_bytes_per_super_block(TYPE); at += 64) __builtin_prefetch(super + at);
  }
}

SIMD float* running_sums(const PanelTask& task) { return static_cast<float*>(task.scratch); }
SIMD void* unpacked_weights(const PanelTask& task) { return static_cast<char*>(task.scratch) + kSumBytes; }

// Sums of `count` rows and of `panels` side by side to y, with the bias.
SIMD void finish_rows(const PanelTask& task, int panel, int panels, int row, int count, const float* sums) {
  for (int p = 0; p < panels; ++p) {
    const int column = (panel + p) * kLanes, left = task.num_columns - column;
    const int n = left < kLanes ? left : kLanes;
    const F bias = task.bias ? load_first(task.bias + column, n) : zero();
    for (int r = 0; r < count; ++r) {
      float* y = task.y + (row + r) * task.y_stride + column;
      F sum = load(sums + (r * panels + p) * kLanes);
      if (task.bias) sum = add(sum, bias);
      if (task.add) sum = add(load_first(y, n), sum);
      store_first(y, sum, n);
    }
  }
}
