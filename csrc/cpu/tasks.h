// What a caller hands to the row and attention kernels. Plain data; strides of the cache are in bytes.
#pragma once

#include <cstddef>
#include <cstdint>

constexpr int kMaxHeadDim = 576;  // latent attention: 512 and 64 rotated
constexpr int kMaxUnitRows = 256;
constexpr int kKeyTile = 64;  // keys whose softmax is formed on its own, by absolute position

struct RopeTask {
  const float* qkv;
  int64_t qkv_stride;
  const int64_t* positions;
  const float* cos_sin;  // rows of rotary_dim, or null
  int rotary_dim;        // 0 when cos_sin is null
  const float* q_norm;   // or null
  const float* k_norm;
  float norm_eps;
  void* cache;
  int cache_type;  // kF32, kF16 or kBF16
  int64_t stride_block, stride_kv, stride_head, stride_slot;
  int block_size;
  const int64_t* slot_mapping;
  float* q_out;
  int num_heads, num_kv_heads, head_dim;
};

struct AttentionTask {
  const float* q;  // (T, H, E), contiguous
  const void* cache;
  int cache_type;
  int64_t stride_block, stride_kv, stride_head, stride_slot;
  int block_size;
  const int32_t* block_table;
  int64_t block_table_stride;
  const int32_t* query_start;
  const int32_t* seq_lens;
  const float* sinks;  // or null
  float* out;          // (T, H * E)
  int num_heads, num_kv_heads, head_dim;
  float scale;
  int window;
  float softcap;
};

// Query rows of one key/value head: tokens [first_token, first_token + num_tokens) of a request times the heads that
// share it; or, with partials, one part of their keys.
struct AttentionUnit {
  int request;
  int kv_head;
  int first_token;  // counted from the request's first query
  int num_tokens;
  int first_tile;  // key tiles [first_tile, end_tile)
  int end_tile;
  float* partials;  // null: all tiles, merged and written; else (tile, row) records of head_dim + 2 floats
};
