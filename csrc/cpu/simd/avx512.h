// Sixteen lanes on AVX-512 (F, BW, DQ, VL, VNNI): one register each.
//
// Every simd/*.h offers the same names, and each does the same IEEE operation in every lane, so that a kernel written
// on top gives the same bits at every level. Included by isa.cpp alone, inside an anonymous namespace.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define SIMD static inline __attribute__((always_inline))
#define SONAR_ROWS_TOGETHER 0  // the integer tile takes a sub-block of all its rows at a time: rows_dot, not slice_dot
#define SONAR_DIRECT_TILES 1   // enough registers for an unpacked block beside a tile of 16 rows

constexpr int kRowTile = 6;    // register tile of the float kernels: rows
constexpr int kColTile = 4;    // ... times vectors of 16 lanes
constexpr int kGemmRows = 12;  // register tile of the matmul in float32: rows times two panels
constexpr int kGemmPanels = 2;
constexpr int kDotRows = 16;          // rows of the integer tile
constexpr bool kSignedBytes = false;  // 8-bit weights reach the integer tile as value + 128

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};
struct M {
  __mmask16 v;
};

SIMD __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

SIMD F zero() { return {_mm512_setzero_ps()}; }
SIMD F set1(float x) { return {_mm512_set1_ps(x)}; }
SIMD F load(const float* p) { return {_mm512_loadu_ps(p)}; }
SIMD F load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
SIMD void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
SIMD void store_first(float* p, F a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }

SIMD F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
SIMD F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
SIMD F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
SIMD F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
SIMD F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }    // a * b + c
SIMD F fnma(F a, F b, F c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a * b
SIMD F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
SIMD F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
SIMD F sqrt(F a) { return {_mm512_sqrt_ps(a.v)}; }
SIMD F abs(F a) { return {_mm512_abs_ps(a.v)}; }

SIMD M less(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
SIMD M less(I a, I b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
SIMD F select(M m, F yes, F no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }
SIMD unsigned bits_of(M m) { return m.v; }

SIMD I iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
SIMD I iload(const void* p) { return {_mm512_loadu_si512(p)}; }
SIMD void istore(void* p, I a) { _mm512_storeu_si512(p, a.v); }
SIMD I iota() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
SIMD I add(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
SIMD I sub(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
SIMD I mul(I a, I b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
SIMD I bit_and(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
SIMD I bit_or(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
SIMD I bit_xor(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
SIMD I shift_left(I a, int n) { return {_mm512_slli_epi32(a.v, n)}; }
SIMD I shift_right(I a, int n) { return {_mm512_srli_epi32(a.v, n)}; }  // logical

SIMD I round_to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }  // nearest, ties to even
SIMD F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
SIMD F as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
SIMD I as_int(F a) { return {_mm512_castps_si512(a.v)}; }

SIMD F load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
SIMD void store_f16(uint16_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
SIMD I load_u16(const uint16_t* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
SIMD void store_low_u16(uint16_t* p, I a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}
SIMD I load_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
SIMD I load_s8(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
SIMD void store_low_s8(int8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v)); }

// Lane l meets l + 8, then l + 4, l + 2, l + 1: the one order of every level.
SIMD float reduce_add(F a) {
  const __m256 a8 = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 a4 = _mm_add_ps(_mm256_castps256_ps128(a8), _mm256_extractf128_ps(a8, 1));
  const __m128 a2 = _mm_add_ps(a4, _mm_movehl_ps(a4, a4));
  return _mm_cvtss_f32(_mm_add_ss(a2, _mm_movehdup_ps(a2)));
}
SIMD float reduce_max(F a) {
  const __m256 a8 = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 a4 = _mm_max_ps(_mm256_castps256_ps128(a8), _mm256_extractf128_ps(a8, 1));
  const __m128 a2 = _mm_max_ps(a4, _mm_movehl_ps(a4, a4));
  return _mm_cvtss_f32(_mm_max_ss(a2, _mm_movehdup_ps(a2)));
}
SIMD int32_t reduce_add(I a) { return _mm512_reduce_add_epi32(a.v); }

// out[c * ld + r] = rows[r].lane[c]: 16 rows of 16 floats, turned in four stages of pairwise shuffles.
SIMD void transpose_store(const F rows[16], float* out, int ld) {
  __m512 a[16], b[16];
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_ps(rows[2 * i].v, rows[2 * i + 1].v);
    a[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i].v, rows[2 * i + 1].v);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d lo0 = _mm512_castps_pd(a[4 * i]), lo1 = _mm512_castps_pd(a[4 * i + 2]);
    const __m512d hi0 = _mm512_castps_pd(a[4 * i + 1]), hi1 = _mm512_castps_pd(a[4 * i + 3]);
    b[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(lo0, lo1));
    b[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(lo0, lo1));
    b[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(hi0, hi1));
    b[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(hi0, hi1));
  }
  // b[4 i + j] holds column j of rows 4 i .. 4 i + 3 in its first quarter, columns j + 4, j + 8, j + 12 in the others.
  for (int j = 0; j < 4; ++j) {
    const __m512 even01 = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88);  // quarters 0, 2 of both
    const __m512 odd01 = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);   // quarters 1, 3
    const __m512 even23 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88);
    const __m512 odd23 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
    _mm512_storeu_ps(out + j * ld, _mm512_shuffle_f32x4(even01, even23, 0x88));
    _mm512_storeu_ps(out + (j + 4) * ld, _mm512_shuffle_f32x4(odd01, odd23, 0x88));
    _mm512_storeu_ps(out + (j + 8) * ld, _mm512_shuffle_f32x4(even01, even23, 0xdd));
    _mm512_storeu_ps(out + (j + 12) * ld, _mm512_shuffle_f32x4(odd01, odd23, 0xdd));
  }
}

// The integer tile works on slices of the sixteen lanes; here the slice is all of them. Dot products are exact, so
// their order is free.
constexpr int kSlices = 1, kSliceLanes = 16;
using SliceF = __m512;
using SliceI = __m512i;

SIMD SliceF slice_load(const float* p) { return _mm512_loadu_ps(p); }
SIMD void slice_store(float* p, SliceF a) { _mm512_storeu_ps(p, a); }
SIMD SliceF slice_set1(float x) { return _mm512_set1_ps(x); }
SIMD SliceF slice_mul(SliceF a, SliceF b) { return _mm512_mul_ps(a, b); }
SIMD SliceF slice_fma(SliceF a, SliceF b, SliceF c) { return _mm512_fmadd_ps(a, b, c); }
SIMD SliceF slice_to_float(SliceI a) { return _mm512_cvtepi32_ps(a); }
SIMD SliceI slice_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
SIMD SliceF slice_of(F a) { return a.v; }
SIMD SliceI slice_of(I a) { return a.v; }
SIMD SliceI slice_iset1(int32_t x) { return _mm512_set1_epi32(x); }
template <int N>
SIMD SliceI slice_shift_left(SliceI a) {
  return _mm512_slli_epi32(a, N);
}

// start + the four products of each lane's bytes with the bytes x[0 .. 3].
SIMD SliceI slice_dot4(SliceI start, SliceI w, const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm512_dpbusd_epi32(start, w, _mm512_set1_epi32(four));
}

// start + sum over g of the products with x[4 g .. 4 g + 3]. A chain of eight would hold the schedulers for longer than
// they have entries: two of four.
template <int BITS, int G>
SIMD SliceI slice_dot(SliceI start, const SliceI w[G], const int8_t* x) {
  SliceI second = _mm512_setzero_si512();
  for (int g = 0; g < 4; ++g) {
    start = slice_dot4(start, w[g], x + 4 * g);
    if constexpr (G == 8) second = slice_dot4(second, w[g + 4], x + 4 * g + 16);
  }
  return G == 8 ? _mm512_add_epi32(start, second) : start;
}
