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
