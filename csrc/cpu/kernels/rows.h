// Work on single rows: norms, activations, rotary embedding. Included by isa.cpp.
//
// A row's sums run in one fixed order (four interleaved chains of sixteen lanes, then the tree of reduce_add), whoever
// calls.
#pragma once

#include "../tasks.h"
#include "elementary.h"

// Sum over i of f(vector i), where the last vector is filled up with zeros.
template <class Load>
SIMD float sum_row(int n, Load value) {
  F sum[4] = {zero(), zero(), zero(), zero()};
  int i = 0, chain = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int c = 0; c < 4; ++c) sum[c] = add(sum[c], value(i + c * kLanes, kLanes));
  for (; i < n; i += kLanes, ++chain) sum[chain] = add(sum[chain], value(i, n - i < kLanes ? n - i : kLanes));
  return reduce_add(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
}

SIMD F load_upto(const float* p, int n) { return n == kLanes ? load(p) : load_first(p, n); }
SIMD void store_upto(float* p, F a, int n) { n == kLanes ? store(p, a) : store_first(p, a, n); }
SIMD float sqrt1(float x) {
  float lanes[16];
  store(lanes, sqrt(set1(x)));
  return lanes[0];
}

static void rms_norm_row(const float* x, const float* weight, float* out, int d, float eps) {
  const float squares = sum_row(d, [x](int i, int n) __attribute__((always_inline)) {
    const F v = load_upto(x + i, n);
    return mul(v, v);
  });
  const F inverse = set1(1.0f / sqrt1(squares / static_cast<float>(d) + eps));
  for (int i = 0; i < d; i += kLanes) {
    const int n = d - i < kLanes ? d - i : kLanes;
    store_upto(out + i, mul(mul(load_upto(x + i, n), inverse), load_upto(weight + i, n)), n);
  }
}

static void add_rms_norm_row(const float* x, float* residual, const float* weight, float* out, int d, float eps) {
  for (int i = 0; i < d; i += kLanes) {
    const int n = d - i < kLanes ? d - i : kLanes;
    store_upto(residual + i, add(load_upto(residual + i, n), load_upto(x + i, n)), n);
  }
  rms_norm_row(residual, weight, out, d, eps);
}

static void layer_norm_row(const float* x, const float* weight, const float* bias, float* out, int d, float eps) {
  const float sum = sum_row(d, [x](int i, int n) __attribute__((always_inline)) { return load_upto(x + i, n); });
  const F mean = set1(sum / static_cast<float>(d));
  const float squares = sum_row(d, [x, mean](int i, int n) __attribute__((always_inline)) {
    const F centred = sub(load_upto(x + i, n), mean);
    float lanes[16];
    if (n == kLanes) return mul(centred, centred);
    store(lanes, mul(centred, centred));
    return load_first(lanes, n);
  });
  const F inverse = set1(1.0f / sqrt1(squares / static_cast<float>(d) + eps));
  for (int i = 0; i < d; i += kLanes) {
    const int n = d - i < kLanes ? d - i : kLanes;
    const F centred = mul(sub(load_upto(x + i, n), mean), inverse);
    store_upto(out + i, fma(centred, load_upto(weight + i, n), load_upto(bias + i, n)), n);
  }
}

template <int KIND>
SIMD F activate(F x) {
  if constexpr (KIND == kSilu) return silu(x);
  if constexpr (KIND == kGelu) return gelu(x);
  return gelu_tanh(x);
}

// out[i] = f(x[i]) * gate[i], or f(x[i]) where there is no gate.
template <int KIND>
static void activation_row(const float* x, const float* up, float* out, int n) {
  for (int i = 0; i < n; i += kLanes) {
    const int lanes = n - i < kLanes ? n - i : kLanes;
    F value = activate<KIND>(load_upto(x + i, lanes));
    if (up) value = mul(value, load_upto(up + i, lanes));
    store_upto(out + i, value, lanes);
  }
}

static void activation_row_of(int kind, const float* x, const float* up, float* out, int n) {
  if (kind == kSilu) return activation_row<kSilu>(x, up, out, n);
  if (kind == kGelu) return activation_row<kGelu>(x, up, out, n);
  activation_row<kGeluTanh>(x, up, out, n);
}

// Rounds to the cache's type, to nearest.
SIMD I bf16_bits(F a) {
  const I bits = as_int(a);
  const I odd = bit_and(shift_right(bits, 16), iset1(1));
  return shift_right(add(bits, add(odd, iset1(0x7fff))), 16);
}

static void store_converted(int type, const float* x, void* out, int n) {
  for (int i = 0; i < n; i += kLanes) {
    const int lanes = n - i < kLanes ? n - i : kLanes;
    const F value = load_upto(x + i, lanes);
    if (type == kF32) {
      store_upto(static_cast<float*>(out) + i, value, lanes);
      continue;
    }
    uint16_t halves[16];
    type == kF16 ? store_f16(halves, value) : store_low_u16(halves, bf16_bits(value));
    __builtin_memcpy(static_cast<uint16_t*>(out) + i, halves, lanes * 2);
  }
}

// One head: RMSNorm (with a weight), then rotation of pairs (i, i + rotary_dim / 2); the rest passes through.
static void rope_head(const RopeTask& task, const float* in, const float* norm, const float* cos_sin, float* out) {
  const float* x = in;
  if (norm) {
    rms_norm_row(in, norm, out, task.head_dim, task.norm_eps);
    x = out;
  }
  const int half = task.rotary_dim / 2;
  const float *cosines = cos_sin, *sines = cos_sin + half;
  for (int i = 0; i < half; i += kLanes) {
    const int n = half - i < kLanes ? half - i : kLanes;
    const F first = load_upto(x + i, n), second = load_upto(x + half + i, n);
    const F c = load_upto(cosines + i, n), s = load_upto(sines + i, n);
    store_upto(out + i, fnma(second, s, mul(first, c)), n);
    store_upto(out + half + i, fma(first, s, mul(second, c)), n);
  }
  if (x != out)
    for (int i = task.rotary_dim; i < task.head_dim; ++i) out[i] = x[i];
}

static void rope_kv_write_token(const RopeTask& task, int token) {
  const int e = task.head_dim, heads = task.num_heads, kv_heads = task.num_kv_heads;
  const float* qkv = task.qkv + token * task.qkv_stride;
  const float* cos_sin = task.cos_sin ? task.cos_sin + task.positions[token] * task.rotary_dim : nullptr;
  float* q = task.q_out + static_cast<int64_t>(token) * heads * e;
  for (int h = 0; h < heads; ++h) rope_head(task, qkv + h * e, task.q_norm, cos_sin, q + h * e);
  const int64_t slot = task.slot_mapping[token];
  const int64_t block = slot / task.block_size, offset = slot % task.block_size;
  char* cache = static_cast<char*>(task.cache) + block * task.stride_block + offset * task.stride_slot;
  alignas(64) float rotated[kMaxHeadDim];
  for (int g = 0; g < kv_heads; ++g) {
    rope_head(task, qkv + (heads + g) * e, task.k_norm, cos_sin, rotated);
    store_converted(task.cache_type, rotated, cache + g * task.stride_head, e);
    store_converted(task.cache_type, qkv + (heads + kv_heads + g) * e, cache + task.stride_kv + g * task.stride_head,
                    e);
  }
}
