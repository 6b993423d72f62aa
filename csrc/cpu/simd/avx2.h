// Sixteen lanes on AVX2 with FMA and F16C (and AVX-VNNI, where the compiler is told so): two registers each.
//
// See avx512.h for the contract of these names. Included by isa.cpp alone, inside an anonymous namespace.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define SIMD static inline __attribute__((always_inline))
#define SONAR_ROWS_TOGETHER 1  // the integer tile takes a sub-block of all its rows at a time: rows_dot, not slice_dot
#define SONAR_DIRECT_TILES 0   // enough registers for an unpacked block beside a tile of 16 rows

constexpr int kRowTile = 6;  // 12 accumulators, 2 of a column, 1 broadcast: 15 of 16 registers
constexpr int kColTile = 1;
constexpr int kGemmRows = 6;
constexpr int kGemmPanels = 1;
constexpr int kDotRows = 4;
#ifdef __AVXVNNI__
constexpr bool kSignedBytes = false;
#else
constexpr bool kSignedBytes = true;  // unsigned bytes above 127 would overflow the 16-bit pair sums
#endif

struct F {
  __m256 lo, hi;
};
struct I {
  __m256i lo, hi;
};
struct M {
  __m256 lo, hi;
};

SIMD __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
SIMD __m256i loadu(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
SIMD __m128i loadu_half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

SIMD F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
SIMD F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SIMD F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SIMD F load_first(const float* p, int n) {
  return {_mm256_maskload_ps(p, first_lanes(n)), _mm256_maskload_ps(p + 8, first_lanes(n - 8))};
}
SIMD void store(float* p, F a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
SIMD void store_first(float* p, F a, int n) {
  _mm256_maskstore_ps(p, first_lanes(n), a.lo);
  _mm256_maskstore_ps(p + 8, first_lanes(n - 8), a.hi);
}

SIMD F add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
SIMD F sub(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
SIMD F mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
SIMD F div(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
SIMD F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
SIMD F fnma(F a, F b, F c) { return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)}; }
SIMD F max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
SIMD F min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
SIMD F sqrt(F a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
SIMD F abs(F a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}

SIMD M less(F a, F b) { return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)}; }
SIMD M less(I a, I b) {
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.lo, a.lo)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(b.hi, a.hi))};
}
SIMD F select(M m, F yes, F no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}
SIMD unsigned bits_of(M m) {
  return static_cast<unsigned>(_mm256_movemask_ps(m.lo)) | static_cast<unsigned>(_mm256_movemask_ps(m.hi)) << 8;
}

SIMD I iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
SIMD I iload(const void* p) { return {loadu(p), loadu(static_cast<const char*>(p) + 32)}; }
SIMD void istore(void* p, I a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, a.hi);
}
SIMD I iota() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)}; }
SIMD I add(I a, I b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
SIMD I sub(I a, I b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
SIMD I mul(I a, I b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
SIMD I bit_and(I a, I b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
SIMD I bit_or(I a, I b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
SIMD I bit_xor(I a, I b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
SIMD I shift_left(I a, int n) { return {_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)}; }
SIMD I shift_right(I a, int n) { return {_mm256_srli_epi32(a.lo, n), _mm256_srli_epi32(a.hi, n)}; }

SIMD I round_to_int(F a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
SIMD F to_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
SIMD F as_float(I a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
SIMD I as_int(F a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }

SIMD F load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(loadu_half(p)), _mm256_cvtph_ps(loadu_half(p + 8))}; }
SIMD void store_f16(uint16_t* p, F a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
SIMD I load_u16(const uint16_t* p) {
  return {_mm256_cvtepu16_epi32(loadu_half(p)), _mm256_cvtepu16_epi32(loadu_half(p + 8))};
}
// Takes the low 16 bits of each lane: pack with saturation would not, so the upper halves are cleared first.
SIMD __m256i pack_low_u16(I a) {
  const __m256i mask = _mm256_set1_epi32(0xffff);
  const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}
SIMD void store_low_u16(uint16_t* p, I a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack_low_u16(a)); }
SIMD I load_u8(const uint8_t* p) {
  const __m128i bytes = loadu_half(p);
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
SIMD I load_s8(const int8_t* p) {
  const __m128i bytes = loadu_half(p);
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
SIMD void store_low_s8(int8_t* p, I a) {
  const __m256i words = _mm256_and_si256(pack_low_u16(a), _mm256_set1_epi16(0xff));
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

SIMD float reduce_add(F a) {
  const __m256 a8 = _mm256_add_ps(a.lo, a.hi);
  const __m128 a4 = _mm_add_ps(_mm256_castps256_ps128(a8), _mm256_extractf128_ps(a8, 1));
  const __m128 a2 = _mm_add_ps(a4, _mm_movehl_ps(a4, a4));
  return _mm_cvtss_f32(_mm_add_ss(a2, _mm_movehdup_ps(a2)));
}
SIMD float reduce_max(F a) {
  const __m256 a8 = _mm256_max_ps(a.lo, a.hi);
  const __m128 a4 = _mm_max_ps(_mm256_castps256_ps128(a8), _mm256_extractf128_ps(a8, 1));
  const __m128 a2 = _mm_max_ps(a4, _mm_movehl_ps(a4, a4));
  return _mm_cvtss_f32(_mm_max_ss(a2, _mm_movehdup_ps(a2)));
}
SIMD int32_t reduce_add(I a) {
  const __m256i a8 = _mm256_add_epi32(a.lo, a.hi);
  const __m128i a4 = _mm_add_epi32(_mm256_castsi256_si128(a8), _mm256_extracti128_si256(a8, 1));
  const __m128i a2 = _mm_add_epi32(a4, _mm_shuffle_epi32(a4, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(a2, _mm_shuffle_epi32(a2, 0xb1)));
}

SIMD void transpose8_store(const __m256 r[8], float* out, int ld) {
  __m256 a[8];
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int pair = 0; pair < 2; ++pair) {
    const __m256 even_top = _mm256_shuffle_ps(a[pair], a[2 + pair], 0x44);
    const __m256 odd_top = _mm256_shuffle_ps(a[pair], a[2 + pair], 0xee);
    const __m256 even_bottom = _mm256_shuffle_ps(a[4 + pair], a[6 + pair], 0x44);
    const __m256 odd_bottom = _mm256_shuffle_ps(a[4 + pair], a[6 + pair], 0xee);
    _mm256_storeu_ps(out + (2 * pair) * ld, _mm256_permute2f128_ps(even_top, even_bottom, 0x20));
    _mm256_storeu_ps(out + (2 * pair + 1) * ld, _mm256_permute2f128_ps(odd_top, odd_bottom, 0x20));
    _mm256_storeu_ps(out + (2 * pair + 4) * ld, _mm256_permute2f128_ps(even_top, even_bottom, 0x31));
    _mm256_storeu_ps(out + (2 * pair + 5) * ld, _mm256_permute2f128_ps(odd_top, odd_bottom, 0x31));
  }
}
SIMD void transpose_store(const F rows[16], float* out, int ld) {
  for (int half = 0; half < 2; ++half) {
    __m256 lo[8], hi[8];
    for (int i = 0; i < 8; ++i) {
      lo[i] = rows[8 * half + i].lo;
      hi[i] = rows[8 * half + i].hi;
    }
    transpose8_store(lo, out + 8 * half, ld);
    transpose8_store(hi, out + 8 * ld + 8 * half, ld);
  }
}

// One slice of all lanes for the integer tile (see avx512.h), but all rows together: a register pair of weights at a
// time meets each row's four bytes, broadcast once for both halves. Eight pairs of weights would not fit the registers.
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

// Keeps the compiler from moving work across: it would gather all broadcasts first and spill what they push out.
SIMD void pin(__m256i& a) { asm volatile("" : "+x"(a)); }
SIMD void pin(I& a) { asm volatile("" : "+x"(a.lo), "+x"(a.hi)); }

// dots[r] += sum over the G groups of the four products of each lane's bytes with row r's; rows are 32 bytes apart.
template <int BITS, int G, int R>
SIMD void rows_dot(SliceI dots[R], const uint8_t* bytes, const int8_t* x) {
#ifdef __AVXVNNI__
  constexpr int run = G;
#else
  // maddubs makes 16-bit sums of two products. With |x| <= 127, as many of them as stay below 2^15 are added before
  // they are widened: all 8 groups of 4-bit weights (8 * 2 * 15 * 127 = 30,480), 4 of 5 bits, 2 of 6 bits.
  constexpr int run = BITS <= 4 ? G : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;
  const __m256i ones = _mm256_set1_epi16(1);
#endif
  for (int first = 0; first < G; first += run) {
    I pairs[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) pairs[r] = iset1(0);
#pragma GCC unroll 8
    for (int g = first; g < first + run; ++g) {
      const I w = iload(bytes + 64 * g);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        int32_t four;
        __builtin_memcpy(&four, x + 32 * r + 4 * g, 4);
        __m256i x4 = _mm256_set1_epi32(four);
        pin(x4);
#ifdef __AVXVNNI__
        dots[r] = {_mm256_dpbusd_avx_epi32(dots[r].lo, w.lo, x4), _mm256_dpbusd_avx_epi32(dots[r].hi, w.hi, x4)};
#else
        I product;
        if constexpr (BITS == 8) {
          // 8-bit weights are signed: the sign moves to x, whose -128 the quantizer never makes.
          product = {_mm256_maddubs_epi16(_mm256_abs_epi8(w.lo), _mm256_sign_epi8(x4, w.lo)),
                     _mm256_maddubs_epi16(_mm256_abs_epi8(w.hi), _mm256_sign_epi8(x4, w.hi))};
        } else {
          product = {_mm256_maddubs_epi16(w.lo, x4), _mm256_maddubs_epi16(w.hi, x4)};
        }
        pairs[r] = {_mm256_add_epi16(pairs[r].lo, product.lo), _mm256_add_epi16(pairs[r].hi, product.hi)};
        pin(pairs[r]);
#endif
      }
    }
#ifndef __AVXVNNI__
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      dots[r] = add(dots[r], I{_mm256_madd_epi16(pairs[r].lo, ones), _mm256_madd_epi16(pairs[r].hi, ones)});
    }
#endif
  }
}
