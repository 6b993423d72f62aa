// Passes over a row of logits for sampling. Included by isa.cpp.
#pragma once

#include "elementary.h"

// Index of the largest value, the lowest on ties.
static int argmax_row(const float* x, int n) {
  F best = set1(-__builtin_inff());
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) best = max(best, load(x + i));
  float most = reduce_max(best);
  for (; i < n; ++i) most = x[i] > most ? x[i] : most;
  const F target = set1(most);
  for (i = 0; i + kLanes <= n; i += kLanes) {
    const unsigned below = bits_of(less(load(x + i), target));
    if (below != 0xffffu) return i + __builtin_ctz(~below);
  }
  for (; i < n; ++i)
    if (!(x[i] < most)) return i;
  return 0;
}

static void divide_row(const float* x, float divisor, float* out, int n) {
  for (int i = 0; i < n; i += kLanes) {
    const int lanes = n - i < kLanes ? n - i : kLanes;
    const F value = lanes == kLanes ? load(x + i) : load_first(x + i, lanes);
    store_first(out + i, div(value, set1(divisor)), lanes);
  }
}

static void exp_row(const float* x, float shift, float* out, int n) {
  for (int i = 0; i < n; i += kLanes) {
    const int lanes = n - i < kLanes ? n - i : kLanes;
    const F value = lanes == kLanes ? load(x + i) : load_first(x + i, lanes);
    store_first(out + i, exp(sub(value, set1(shift))), lanes);
  }
}

// ln x for positive normal x, to about 2e-7 absolute + relative: x = 2^e m with m in [sqrt(1/2), sqrt(2)), and
// ln m = 2 artanh(t), t = (m - 1) / (m + 1), |t| < 0.172, by its series to t^9.
SIMD F log(F x) {
  const I bits = as_int(x);
  const I shifted = add(bits, iset1(0x3f800000 - 0x3f3504f3));
  const F e = to_float(sub(shift_right(shifted, 23), iset1(127)));
  const F m = as_float(add(bit_and(shifted, iset1(0x7fffff)), iset1(0x3f3504f3)));
  const F t = div(sub(m, set1(1.0f)), add(m, set1(1.0f)));
  const F t2 = mul(t, t);
  F sum = set1(2.0f / 9);
  sum = fma(sum, t2, set1(2.0f / 7));
  sum = fma(sum, t2, set1(2.0f / 5));
  sum = fma(sum, t2, set1(2.0f / 3));
  sum = fma(sum, t2, set1(2.0f));
  return fma(e, set1(0.69314718f), mul(sum, t));
}

SIMD I mix(I h) {
  h = bit_xor(h, shift_right(h, 16));
  h = mul(h, iset1(static_cast<int32_t>(0x85ebca6bu)));
  h = bit_xor(h, shift_right(h, 13));
  h = mul(h, iset1(static_cast<int32_t>(0xc2b2ae35u)));
  return bit_xor(h, shift_right(h, 16));
}

// out[i] = scores[i] + Gumbel noise of token ids[i] (or i) in float32, near enough (1e-4) to pick out the few tokens
// that may win; their exact values are the caller's work. Returns the largest.
static float gumbel_row(const float* scores, const int32_t* ids, int n, uint32_t key0, uint32_t key1, float* out) {
  F best = set1(-__builtin_inff());
  for (int i = 0; i < n; i += kLanes) {
    const int lanes = n - i < kLanes ? n - i : kLanes;
    I id = add(iota(), iset1(i));
    if (ids) {
      int32_t some[16] = {};
      __builtin_memcpy(some, ids + i, lanes * 4);
      id = iload(some);
    }
    I h = mix(add(mul(id, iset1(static_cast<int32_t>(0x9e3779b1u))), iset1(static_cast<int32_t>(key0))));
    h = shift_right(mix(bit_xor(h, iset1(static_cast<int32_t>(key1)))), 8);
    // Both u and 1 - u as floats, each exact where it is small.
    const F half = set1(0.5f), unit = set1(0x1p-24f);
    const F u = mul(add(to_float(h), half), unit);
    const F rest = mul(add(to_float(sub(iset1(0xffffff), h)), half), unit);
    // -ln u; for u near 1 by the series of -ln(1 - rest).
    F series = fma(rest, set1(0.25f), set1(1.0f / 3));
    series = fma(series, rest, half);
    series = fma(mul(series, rest), rest, rest);
    const F minus_log = select(less(rest, set1(0.01f)), series, sub(zero(), log(u)));
    F value = load_upto(scores + i, lanes);
    value = sub(value, log(minus_log));
    store_upto(out + i, value, lanes);
    if (lanes < kLanes) value = select(less(iota(), iset1(lanes)), value, set1(-__builtin_inff()));
    best = max(best, value);
  }
  return reduce_max(best);
}
