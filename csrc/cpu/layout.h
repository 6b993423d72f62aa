// How weights lie in memory once packed, and the plain structs that pass between the scheduling code and the kernels.
//
// A packed matrix is a row of panels. A panel holds 16 output rows, lane by lane, over all of K, so that one register
// holds the same column of 16 rows: sums run over K inside a lane and their order never depends on anything else.
//   quantized: [meta of every super-block][planes of every block], both sections starting on 64 bytes.
//     A block is 32 columns. Its quants (0 .. 2^bits - 1) are split in planes of 4, 2, 1 or 8 bits. With groups g =
//     0..7 of 4 columns and byte (lane, column % 4) of a 64-byte line:
//       8 bits: line g holds group g (as signed bytes).
//       4 bits: line j = 0..3 holds group j in the low nibbles, group j + 4 in the high ones.
//       2 bits: line z = 0..1 holds groups 4 z + s in bits 2 s.      1 bit: one line holds group g in bit g.
//     5 bits = 4 + 1, 6 = 4 + 2, 3 = 2 + 1; the wider plane comes first and is the lower part of the value.
//     Meta of 32 columns: d[16 lanes] f16 (, m[16] f16). Of 256 columns: d[16] f16 (, dmin[16] f16), scale bytes
//     [sub-block][16] (, min bytes alike; Q2_K keeps both in one byte).
//   plain: [K][16 lanes] in the stored float type.
// Rows past N are zero.
#pragma once

#include <cstddef>
#include <cstdint>

constexpr int kLanes = 16;
constexpr int kBlock = 32;

// GGML's numbers of the types.
enum WeightType : int {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
  kNumWeightTypes = 31,
};

struct TypeInfo {
  int bits;         // of a quant; 16 or 32 for the plain types
  int super_block;  // columns of a GGUF block: 32 or 256; 1 for the plain types
  int sub_block;    // columns that share a scale: 32 or 16
  bool has_min;     // value = scale * quant + min, else scale * (quant - 2^offset_bits)
  int offset_bits;
  int gguf_bytes;  // of a GGUF block
};

constexpr TypeInfo type_info(int type) {
  switch (type) {
    case kF32:
      return {32, 1, 0, false, 0, 4};
    case kF16:
      return {16, 1, 0, false, 0, 2};
    case kBF16:
      return {16, 1, 0, false, 0, 2};
    case kQ4_0:
      return {4, 32, 32, false, 3, 18};
    case kQ4_1:
      return {4, 32, 32, true, 0, 20};
    case kQ5_0:
      return {5, 32, 32, false, 4, 22};
    case kQ5_1:
      return {5, 32, 32, true, 0, 24};
    case kQ8_0:
      return {8, 32, 32, false, 7, 34};
    case kQ2_K:
      return {2, 256, 16, true, 0, 84};
    case kQ3_K:
      return {3, 256, 16, false, 2, 110};
    case kQ4_K:
      return {4, 256, 32, true, 0, 144};
    case kQ5_K:
      return {5, 256, 32, true, 0, 176};
    case kQ6_K:
      return {6, 256, 16, false, 5, 210};
    default:
      return {0, 0, 0, false, 0, 0};
  }
}

constexpr bool is_known(int type) { return type_info(type).bits != 0; }
constexpr bool is_plain(int type) { return type_info(type).super_block == 1; }

constexpr size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

constexpr int meta_bytes_per_super_block(int type) {
  const TypeInfo info = type_info(type);
  const int halves = (info.has_min ? 2 : 1) * kLanes * 2;
  if (info.super_block == kBlock) return halves;
  const int num_sub = info.super_block / info.sub_block;
  return halves + num_sub * kLanes * (info.has_min && type != kQ2_K ? 2 : 1);
}

constexpr int plane_bytes_per_block(int type) { return kBlock * kLanes * type_info(type).bits / 8; }

constexpr size_t meta_bytes_per_panel(int type, int k) {
  return round_up(static_cast<size_t>(k / type_info(type).super_block) * meta_bytes_per_super_block(type), 64);
}

constexpr size_t packed_panel_bytes(int type, int k) {
  if (is_plain(type)) return round_up(static_cast<size_t>(k) * kLanes * (type_info(type).bits / 8), 64);
  return meta_bytes_per_panel(type, k) + static_cast<size_t>(k / kBlock) * plane_bytes_per_block(type);
}

// Rows of activations in 8 bits, in tiles of up to 16 rows, so that a tile is read in one stream with constant offsets.
// A row's blocks of 32 share a scale; sums serve the weights' offsets and minimums. For tile t, block b, row r of t:
//   q[((t B + b) rows + r) 32 + column],  and with i = (t B + b) rows + r:
//   scale[i], scaled_sum[i] = scale * sum of the block's q, negative_sum[i] = -sum;
//   the 16 arrays hold the sums of half blocks s = 2 b + half: i = (t 2 B + s) rows + r.
constexpr int kTileRows = 16;

struct QuantizedRows {
  int8_t* q;
  float* scale;
  float* scaled_sum;
  int32_t* negative_sum;
  float* scaled_sum16;
  int32_t* negative_sum16;
  int rows;  // of a tile: 16, or fewer when there are fewer rows in all
  int num_blocks;
};

// Float32 activations the same way: x[(t K + column) rows + r], of tiles as wide as the float kernels' register tile.
struct FloatRows {
  const float* x;
  int rows;

  const float* at(int row, int k) const { return x + static_cast<size_t>(row / rows) * rows * k + row % rows; }
};

// One panel (or a few neighbours) times some rows: y[r * y_stride + lane] for each panel's lanes.
struct PanelTask {
  const uint8_t* panels;
  size_t panel_stride;
  int num_panels;
  int k;
  int first_row;  // of the activations: the start of a tile
  int num_rows;
  float* y;  // at first_row and the first panel's column
  size_t y_stride;
  int num_columns;    // valid columns from there
  const float* bias;  // at the first panel's column, or null
  bool add;           // y += rather than y =
  void* scratch;      // kPanelScratchBytes, aligned to 64
};

// Scratch: running sums of two panels first, then the unpacked weights.
constexpr int kMaxBlockRows = 128;
constexpr size_t kSumBytes = kMaxBlockRows * 2 * kLanes * sizeof(float);
constexpr size_t kPanelScratchBytes = kSumBytes + 40 * 1024;

enum ActivationKind : int { kSilu = 0, kGelu = 1, kGeluTanh = 2 };
