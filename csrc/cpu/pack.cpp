#include "pack.h"

#include <cstring>

#include "half.h"
#include "layout.h"
#include "pool.h"

namespace {

// A GGUF block in one form for all types: quants as unsigned numbers, scales of sub-blocks as bytes.
struct Block {
  uint8_t quant[256];
  uint16_t d, min;
  uint8_t scale[16];  // K types; signed for those without minimums
  uint8_t sub_min[16];
};

uint16_t read16(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// 32 columns: d (, min) (, fifth bits), then bytes whose low nibbles are columns 0..15 and high ones 16..31.
void split_legacy(int type, const uint8_t* src, Block& out) {
  const TypeInfo info = type_info(type);
  out.d = read16(src);
  src += 2;
  if (info.has_min) {
    out.min = read16(src);
    src += 2;
  }
  if (type == kQ8_0) {
    for (int i = 0; i < 32; ++i) out.quant[i] = src[i] ^ 0x80;
    return;
  }
  uint32_t fifth = 0;
  if (info.bits == 5) {
    std::memcpy(&fifth, src, 4);
    src += 4;
  }
  for (int i = 0; i < 16; ++i) {
    out.quant[i] = static_cast<uint8_t>((src[i] & 15) | (fifth >> i & 1) << 4);
    out.quant[i + 16] = static_cast<uint8_t>(src[i] >> 4 | (fifth >> (i + 16) & 1) << 4);
  }
}

// Two bits of column 128 h + 32 s + l lie in byte 32 h + l, bits 2 s.
void read_two_bits(const uint8_t* src, uint8_t* quant) {
  for (int i = 0; i < 256; ++i) quant[i] = src[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
}

// One bit of column 32 i + l lies in byte l, bit i.
int high_bit(const uint8_t* src, int column) { return src[column % 32] >> (column / 32) & 1; }

// Q4_K's and Q5_K's 6-bit scales and minimums of 8 sub-blocks in 12 bytes.
void read_scales6(const uint8_t* src, uint8_t* scale, uint8_t* sub_min) {
  for (int i = 0; i < 4; ++i) {
    scale[i] = src[i] & 63;
    sub_min[i] = src[i + 4] & 63;
    scale[i + 4] = static_cast<uint8_t>((src[i + 8] & 15) | src[i] >> 6 << 4);
    sub_min[i + 4] = static_cast<uint8_t>(src[i + 8] >> 4 | src[i + 4] >> 6 << 4);
  }
}

void split_q2_k(const uint8_t* src, Block& out) {
  for (int i = 0; i < 16; ++i) {
    out.scale[i] = src[i] & 15;
    out.sub_min[i] = src[i] >> 4;
  }
  read_two_bits(src + 16, out.quant);
  out.d = read16(src + 80);
  out.min = read16(src + 82);
}

// Scales are 6 bits, minus 32: low nibbles of bytes 0..7 are sub-blocks 0..7, high ones 8..15, top bits in bytes 8..11.
void split_q3_k(const uint8_t* src, Block& out) {
  read_two_bits(src + 32, out.quant);
  for (int i = 0; i < 256; ++i) out.quant[i] = static_cast<uint8_t>(out.quant[i] | high_bit(src, i) << 2);
  const uint8_t* scales = src + 96;
  for (int i = 0; i < 16; ++i) {
    const int low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4;
    const int high = scales[8 + i % 4] >> (i / 4 * 2) & 3;
    out.scale[i] = static_cast<uint8_t>((low | high << 4) - 32);
  }
  out.d = read16(src + 108);
}

void split_q45_k(int type, const uint8_t* src, Block& out) {
  out.d = read16(src);
  out.min = read16(src + 2);
  read_scales6(src + 4, out.scale, out.sub_min);
  const uint8_t* fifth = src + 16;
  const uint8_t* low = type == kQ5_K ? src + 48 : src + 16;
  for (int i = 0; i < 256; ++i) {
    const int nibble = low[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
    out.quant[i] = static_cast<uint8_t>(type == kQ5_K ? nibble | high_bit(fifth, i) << 4 : nibble);
  }
}

void split_q6_k(const uint8_t* src, Block& out) {
  uint8_t top[256];
  read_two_bits(src + 128, top);
  for (int i = 0; i < 256; ++i) {
    const int nibble = src[i / 128 * 64 + i % 64] >> (i / 64 % 2 * 4) & 15;
    out.quant[i] = static_cast<uint8_t>(nibble | top[i] << 4);
  }
  std::memcpy(out.scale, src + 192, 16);
  out.d = read16(src + 208);
}

void split(int type, const uint8_t* src, Block& out) {
  switch (type) {
    case kQ2_K:
      return split_q2_k(src, out);
    case kQ3_K:
      return split_q3_k(src, out);
    case kQ4_K:
    case kQ5_K:
      return split_q45_k(type, src, out);
    case kQ6_K:
      return split_q6_k(src, out);
    default:
      return split_legacy(type, src, out);
  }
}

void put_meta(int type, const Block& block, int lane, uint8_t* meta) {
  const TypeInfo info = type_info(type);
  std::memcpy(meta + 2 * lane, &block.d, 2);
  if (info.has_min) std::memcpy(meta + 2 * kLanes + 2 * lane, &block.min, 2);
  if (info.super_block == kBlock) return;
  uint8_t* bytes = meta + (info.has_min ? 4 : 2) * kLanes;
  const int num_sub = info.super_block / info.sub_block;
  for (int i = 0; i < num_sub; ++i) {
    uint8_t& at = bytes[i * kLanes + lane];
    at = type == kQ2_K ? static_cast<uint8_t>(block.scale[i] | block.sub_min[i] << 4) : block.scale[i];
    if (info.has_min && type != kQ2_K) bytes[(num_sub + i) * kLanes + lane] = block.sub_min[i];
  }
}

// One lane's 32 quants into a block's planes, which start as zeros.
void put_planes(int bits, const uint8_t* quant, int lane, uint8_t* planes) {
  for (int column = 0; column < kBlock; ++column) {
    const int g = column / 4, q = quant[column];
    uint8_t* at = planes + 4 * lane + column % 4;
    if (bits == 8) {
      at[64 * g] = static_cast<uint8_t>(q ^ 0x80);
      continue;
    }
    int rest = q;
    if (bits >= 4) {
      at[64 * (g % 4)] |= static_cast<uint8_t>((q & 15) << (g / 4 * 4));
      at += 256;
      rest = q >> 4;
    }
    if (bits == 6 || bits == 2 || bits == 3) {
      at[64 * (g / 4)] |= static_cast<uint8_t>((rest & 3) << (g % 4 * 2));
      at += 128;
      rest >>= 2;
    }
    if (bits == 5 || bits == 3) at[0] |= static_cast<uint8_t>(rest << g);
  }
}

void pack_quantized_panel(int type, const uint8_t* rows, size_t row_bytes, int num_rows, int k, uint8_t* out) {
  const TypeInfo info = type_info(type);
  const int blocks_per_super = info.super_block / kBlock;
  uint8_t* planes = out + meta_bytes_per_panel(type, k);
  for (int lane = 0; lane < num_rows; ++lane) {
    const uint8_t* src = rows + lane * row_bytes;
    for (int s = 0; s < k / info.super_block; ++s) {
      Block block;
      split(type, src + static_cast<size_t>(s) * info.gguf_bytes, block);
      put_meta(type, block, lane, out + static_cast<size_t>(s) * meta_bytes_per_super_block(type));
      for (int b = 0; b < blocks_per_super; ++b) {
        const size_t index = static_cast<size_t>(s) * blocks_per_super + b;
        put_planes(info.bits, block.quant + kBlock * b, lane, planes + index * plane_bytes_per_block(type));
      }
    }
  }
}

template <class Element>
void pack_plain_panel(const uint8_t* rows, size_t row_bytes, int num_rows, int k, uint8_t* out) {
  Element* to = reinterpret_cast<Element*>(out);
  for (int lane = 0; lane < num_rows; ++lane) {
    const Element* from = reinterpret_cast<const Element*>(rows + lane * row_bytes);
    for (int i = 0; i < k; ++i) to[static_cast<size_t>(i) * kLanes + lane] = from[i];
  }
}

}  // namespace

size_t stored_row_bytes(int type, int64_t k) {
  const TypeInfo info = type_info(type);
  if (info.bits == 0 || k < 1 || k % info.super_block) return 0;
  return static_cast<size_t>(k / info.super_block) * info.gguf_bytes;
}

void pack_matrix(int type, const uint8_t* rows, size_t row_bytes, int n, int k, uint8_t* out) {
  const size_t panel_bytes = packed_panel_bytes(type, k);
  parallel_for((n + kLanes - 1) / kLanes, [&](int panel) {
    uint8_t* to = out + panel * panel_bytes;
    const uint8_t* from = rows + static_cast<size_t>(panel) * kLanes * row_bytes;
    const int num_rows = n - panel * kLanes < kLanes ? n - panel * kLanes : kLanes;
    std::memset(to, 0, panel_bytes);
    if (!is_plain(type)) {
      pack_quantized_panel(type, from, row_bytes, num_rows, k, to);
    } else if (type == kF32) {
      pack_plain_panel<uint32_t>(from, row_bytes, num_rows, k, to);
    } else {
      pack_plain_panel<uint16_t>(from, row_bytes, num_rows, k, to);
    }
  });
}

void dequantize_row(int type, const uint8_t* row, int k, float* out) {
  if (is_plain(type)) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(row);
    if (type == kF32) std::memcpy(out, row, static_cast<size_t>(k) * 4);
    if (type == kF16)
      for (int i = 0; i < k; ++i) out[i] = float_from_f16(halves[i]);
    if (type == kBF16)
      for (int i = 0; i < k; ++i) out[i] = float_from_bf16(halves[i]);
    return;
  }
  const TypeInfo info = type_info(type);
  const bool has_bytes = info.super_block != kBlock;
  const int offset = info.has_min ? 0 : 1 << info.offset_bits;
  for (int s = 0; s < k / info.super_block; ++s) {
    Block block;
    split(type, row + static_cast<size_t>(s) * info.gguf_bytes, block);
    const float d = float_from_f16(block.d), min = info.has_min ? float_from_f16(block.min) : 0.0f;
    for (int i = 0; i < info.super_block; ++i) {
      const int sub = i / info.sub_block;
      float scale = d, addend = min;
      if (has_bytes) {
        scale = d * static_cast<float>(info.has_min ? block.scale[sub] : static_cast<int8_t>(block.scale[sub]));
        addend = info.has_min ? -(min * static_cast<float>(block.sub_min[sub])) : 0.0f;
      }
      const float value = scale * static_cast<float>(block.quant[i] - offset);
      out[s * info.super_block + i] = info.has_min ? value + addend : value;
    }
  }
}
