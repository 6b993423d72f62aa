// Elementary functions on sixteen floats, built from the same operations at every level, so that the bits agree.
//
// Included by isa.cpp after a simd/*.h.
#pragma once

// e^x to about one unit in the last place. 0 below -86.6 (2e-38), capped at e^88.3 (2e38): never a subnormal or
// infinity.
SIMD F exp(F x) {
  const F lowest = set1(-86.6f);
  const F clamped = min(max(x, lowest), set1(88.3f));
  const I n = round_to_int(mul(clamped, set1(1.44269504f)));
  const F n_float = to_float(n);
  // ln 2 in two parts, the first with few enough bits that n times it is exact.
  F r = fnma(n_float, set1(0.693359375f), clamped);
  r = fnma(n_float, set1(-2.12194440e-4f), r);
  // The series to r^7: |r| <= ln 2 / 2, so the next term is below 6e-9.
  F sum = set1(1.0f / 5040);
  sum = fma(sum, r, set1(1.0f / 720));
  sum = fma(sum, r, set1(1.0f / 120));
  sum = fma(sum, r, set1(1.0f / 24));
  sum = fma(sum, r, set1(1.0f / 6));
  sum = fma(sum, r, set1(0.5f));
  sum = fma(sum, r, set1(1.0f));
  sum = fma(sum, r, set1(1.0f));
  const F value = as_float(add(as_int(sum), shift_left(n, 23)));
  return select(less(x, lowest), zero(), value);
}

SIMD float exp1(float x) {
  float lanes[16];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

// tanh x = 1 - 2 / (e^(2x) + 1), to about 1e-7 absolute.
SIMD F tanh(F x) {
  const F e = exp(add(x, x));
  return sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
}

SIMD F silu(F x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// x Phi(x). erfc(|z|) by Abramowitz and Stegun 7.1.26 (error 1.5e-7), used so that no tail cancels.
SIMD F gelu(F x) {
  const F z = mul(abs(x), set1(0.70710678f));
  const F t = div(set1(1.0f), fma(z, set1(0.3275911f), set1(1.0f)));
  F sum = set1(1.061405429f);
  sum = fma(sum, t, set1(-1.453152027f));
  sum = fma(sum, t, set1(1.421413741f));
  sum = fma(sum, t, set1(-0.284496736f));
  sum = fma(sum, t, set1(0.254829592f));
  const F half_erfc = mul(set1(0.5f), mul(mul(sum, t), exp(sub(zero(), mul(z, z)))));
  return mul(x, select(less(x, zero()), half_erfc, sub(set1(1.0f), half_erfc)));
}

SIMD F gelu_tanh(F x) {
  const F cubed = mul(mul(x, x), x);
  const F inner = mul(set1(0.79788456f), fma(set1(0.044715f), cubed, x));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}
