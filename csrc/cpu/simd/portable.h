// Sixteen lanes in plain C++: what runs where no better level is known. The compiler vectorizes most of it.
//
// See avx512.h for the contract of these names. The fused multiply-add goes through double, whose product of two floats
// is exact: the result differs from a true one only when the two roundings fall on a tie (some 1 in 2^29).
#pragma once

#include <cmath>
#include <cstdint>

#include "../half.h"

#define SIMD static inline __attribute__((always_inline))
#define SONAR_ROWS_TOGETHER 0  // the integer tile takes a sub-block of all its rows at a time: rows_dot, not slice_dot
#define SONAR_DIRECT_TILES 0   // enough registers for an unpacked block beside a tile of 16 rows

constexpr int kRowTile = 3;
constexpr int kColTile = 1;
constexpr int kGemmRows = 4;
constexpr int kGemmPanels = 1;
constexpr int kDotRows = 4;
constexpr bool kSignedBytes = false;

struct F {
  float v[16];
};
struct I {
  int32_t v[16];
};
struct M {
  bool v[16];
};

#define SONAR_LANES(TYPE, EXPRESSION)                   \
  TYPE out;                                             \
  for (int l = 0; l < 16; ++l) out.v[l] = (EXPRESSION); \
  return out

SIMD F zero() { SONAR_LANES(F, 0.0f); }
SIMD F set1(float x) { SONAR_LANES(F, x); }
SIMD F load(const float* p) { SONAR_LANES(F, p[l]); }
SIMD F load_first(const float* p, int n) { SONAR_LANES(F, l < n ? p[l] : 0.0f); }
SIMD void store(float* p, F a) {
  for (int l = 0; l < 16; ++l) p[l] = a.v[l];
}
SIMD void store_first(float* p, F a, int n) {
  for (int l = 0; l < n && l < 16; ++l) p[l] = a.v[l];
}

SIMD F add(F a, F b) { SONAR_LANES(F, a.v[l] + b.v[l]); }
SIMD F sub(F a, F b) { SONAR_LANES(F, a.v[l] - b.v[l]); }
SIMD F mul(F a, F b) { SONAR_LANES(F, a.v[l] * b.v[l]); }
SIMD F div(F a, F b) { SONAR_LANES(F, a.v[l] / b.v[l]); }
SIMD F fma(F a, F b, F c) { SONAR_LANES(F, static_cast<float>(static_cast<double>(a.v[l]) * b.v[l] + c.v[l])); }
SIMD F fnma(F a, F b, F c) { SONAR_LANES(F, static_cast<float>(c.v[l] - static_cast<double>(a.v[l]) * b.v[l])); }
SIMD F max(F a, F b) { SONAR_LANES(F, a.v[l] > b.v[l] ? a.v[l] : b.v[l]); }
SIMD F min(F a, F b) { SONAR_LANES(F, a.v[l] < b.v[l] ? a.v[l] : b.v[l]); }
SIMD F sqrt(F a) { SONAR_LANES(F, std::sqrt(a.v[l])); }
SIMD F abs(F a) { SONAR_LANES(F, std::fabs(a.v[l])); }

SIMD M less(F a, F b) { SONAR_LANES(M, a.v[l] < b.v[l]); }
SIMD M less(I a, I b) { SONAR_LANES(M, a.v[l] < b.v[l]); }
SIMD F select(M m, F yes, F no) { SONAR_LANES(F, m.v[l] ? yes.v[l] : no.v[l]); }
SIMD unsigned bits_of(M m) {
  unsigned bits = 0;
  for (int l = 0; l < 16; ++l) bits |= static_cast<unsigned>(m.v[l]) << l;
  return bits;
}

SIMD uint32_t word(int32_t x) { return static_cast<uint32_t>(x); }
SIMD I iset1(int32_t x) { SONAR_LANES(I, x); }
SIMD I iload(const void* p) {
  I out;
  std::memcpy(out.v, p, sizeof out.v);
  return out;
}
SIMD void istore(void* p, I a) { std::memcpy(p, a.v, sizeof a.v); }
SIMD I iota() { SONAR_LANES(I, l); }
SIMD I add(I a, I b) { SONAR_LANES(I, static_cast<int32_t>(word(a.v[l]) + word(b.v[l]))); }
SIMD I sub(I a, I b) { SONAR_LANES(I, static_cast<int32_t>(word(a.v[l]) - word(b.v[l]))); }
SIMD I mul(I a, I b) { SONAR_LANES(I, static_cast<int32_t>(word(a.v[l]) * word(b.v[l]))); }
SIMD I bit_and(I a, I b) { SONAR_LANES(I, a.v[l] & b.v[l]); }
SIMD I bit_or(I a, I b) { SONAR_LANES(I, a.v[l] | b.v[l]); }
SIMD I bit_xor(I a, I b) { SONAR_LANES(I, a.v[l] ^ b.v[l]); }
SIMD I shift_left(I a, int n) { SONAR_LANES(I, static_cast<int32_t>(word(a.v[l]) << n)); }
SIMD I shift_right(I a, int n) { SONAR_LANES(I, static_cast<int32_t>(word(a.v[l]) >> n)); }

// Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the low bits; |a| stays far below 2^22 here.
SIMD I round_to_int(F a) { SONAR_LANES(I, static_cast<int32_t>(bits_from_float(a.v[l] + 12582912.0f) - 0x4b400000u)); }
SIMD F to_float(I a) { SONAR_LANES(F, static_cast<float>(a.v[l])); }
SIMD F as_float(I a) { SONAR_LANES(F, float_from_bits(word(a.v[l]))); }
SIMD I as_int(F a) { SONAR_LANES(I, static_cast<int32_t>(bits_from_float(a.v[l]))); }

SIMD F load_f16(const uint16_t* p) { SONAR_LANES(F, float_from_f16(p[l])); }
SIMD void store_f16(uint16_t* p, F a) {
  for (int l = 0; l < 16; ++l) p[l] = f16_from_float(a.v[l]);
}
SIMD I load_u16(const uint16_t* p) { SONAR_LANES(I, p[l]); }
SIMD void store_low_u16(uint16_t* p, I a) {
  for (int l = 0; l < 16; ++l) p[l] = static_cast<uint16_t>(word(a.v[l]));
}
SIMD I load_u8(const uint8_t* p) { SONAR_LANES(I, p[l]); }
SIMD I load_s8(const int8_t* p) { SONAR_LANES(I, p[l]); }
SIMD void store_low_s8(int8_t* p, I a) {
  for (int l = 0; l < 16; ++l) p[l] = static_cast<int8_t>(word(a.v[l]));
}

SIMD float reduce_add(F a) {
  for (int step = 8; step > 0; step /= 2)
    for (int l = 0; l < step; ++l) a.v[l] += a.v[l + step];
  return a.v[0];
}
SIMD float reduce_max(F a) {
  float most = a.v[0];
  for (int l = 1; l < 16; ++l) most = a.v[l] > most ? a.v[l] : most;
  return most;
}
SIMD int32_t reduce_add(I a) {
  int32_t sum = 0;
  for (int l = 0; l < 16; ++l) sum += a.v[l];
  return sum;
}
SIMD void transpose_store(const F rows[16], float* out, int ld) {
  for (int c = 0; c < 16; ++c)
    for (int r = 0; r < 16; ++r) out[c * ld + r] = rows[r].v[c];
}

// One slice of all lanes for the integer tile; see avx512.h.
constexpr int kSlices = 1, kSliceLanes = 16;
using SliceF = F;
using SliceI = I;

SIMD SliceF slice_load(const float* p) { return load(p); }
SIMD void slice_store(float* p, SliceF a) { store(p, a); }
SIMD SliceF slice_set1(float x) { return set1(x); }
SIMD SliceF slice_mul(SliceF a, SliceF b) { return mul(a, b); }
SIMD SliceF slice_fma(SliceF a, SliceF b, SliceF c) { return fma(a, b, c); }
SIMD SliceF slice_to_float(SliceI a) { return to_float(a); }
SIMD SliceI slice_bytes(const uint8_t* p) { return iload(p); }
SIMD SliceI slice_iset1(int32_t x) { return iset1(x); }
template <int N>
SIMD SliceI slice_shift_left(SliceI a) {
  return shift_left(a, N);
}

template <int BITS, int G>
SIMD SliceI slice_dot(SliceI start, const SliceI w[G], const int8_t* x) {
  for (int g = 0; g < G; ++g) {
    for (int l = 0; l < 16; ++l) {
      const uint32_t four = word(w[g].v[l]);
      start.v[l] += static_cast<int32_t>(four & 255) * x[4 * g] + static_cast<int32_t>(four >> 8 & 255) * x[4 * g + 1] +
                    static_cast<int32_t>(four >> 16 & 255) * x[4 * g + 2] +
                    static_cast<int32_t>(four >> 24) * x[4 * g + 3];
    }
  }
  return start;
}
