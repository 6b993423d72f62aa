// Sixteen lanes on AArch64 NEON: four registers each.
//
// See avx512.h for the contract of these names. Included by isa.cpp alone, inside an anonymous namespace. Written from
// the architecture's manual; it is compiled on AArch64 only and simple on purpose.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#define SIMD static inline __attribute__((always_inline))
#define SONAR_ROWS_TOGETHER 0  // the integer tile takes a sub-block of all its rows at a time: rows_dot, not slice_dot
#define SONAR_DIRECT_TILES 0   // enough registers for an unpacked block beside a tile of 16 rows

constexpr int kRowTile = 6;
constexpr int kColTile = 1;
constexpr int kGemmRows = 6;
constexpr int kGemmPanels = 1;
constexpr int kDotRows = 4;
constexpr bool kSignedBytes = true;  // sdot multiplies signed by signed

struct F {
  float32x4_t v[4];
};
struct I {
  int32x4_t v[4];
};
struct M {
  uint32x4_t v[4];
};

#define SONAR_QUARTERS(TYPE, EXPRESSION)               \
  TYPE out;                                            \
  for (int q = 0; q < 4; ++q) out.v[q] = (EXPRESSION); \
  return out

SIMD F zero() { SONAR_QUARTERS(F, vdupq_n_f32(0.0f)); }
SIMD F set1(float x) { SONAR_QUARTERS(F, vdupq_n_f32(x)); }
SIMD F load(const float* p) { SONAR_QUARTERS(F, vld1q_f32(p + 4 * q)); }
SIMD void store(float* p, F a) {
  for (int q = 0; q < 4; ++q) vst1q_f32(p + 4 * q, a.v[q]);
}
SIMD F load_first(const float* p, int n) {
  float lanes[16] = {};
  for (int l = 0; l < n && l < 16; ++l) lanes[l] = p[l];
  return load(lanes);
}
SIMD void store_first(float* p, F a, int n) {
  float lanes[16];
  store(lanes, a);
  for (int l = 0; l < n && l < 16; ++l) p[l] = lanes[l];
}

SIMD F add(F a, F b) { SONAR_QUARTERS(F, vaddq_f32(a.v[q], b.v[q])); }
SIMD F sub(F a, F b) { SONAR_QUARTERS(F, vsubq_f32(a.v[q], b.v[q])); }
SIMD F mul(F a, F b) { SONAR_QUARTERS(F, vmulq_f32(a.v[q], b.v[q])); }
SIMD F div(F a, F b) { SONAR_QUARTERS(F, vdivq_f32(a.v[q], b.v[q])); }
SIMD F fma(F a, F b, F c) { SONAR_QUARTERS(F, vfmaq_f32(c.v[q], a.v[q], b.v[q])); }
SIMD F fnma(F a, F b, F c) { SONAR_QUARTERS(F, vfmsq_f32(c.v[q], a.v[q], b.v[q])); }
SIMD F max(F a, F b) { SONAR_QUARTERS(F, vmaxq_f32(a.v[q], b.v[q])); }
SIMD F min(F a, F b) { SONAR_QUARTERS(F, vminq_f32(a.v[q], b.v[q])); }
SIMD F sqrt(F a) { SONAR_QUARTERS(F, vsqrtq_f32(a.v[q])); }
SIMD F abs(F a) { SONAR_QUARTERS(F, vabsq_f32(a.v[q])); }

SIMD M less(F a, F b) { SONAR_QUARTERS(M, vcltq_f32(a.v[q], b.v[q])); }
SIMD M less(I a, I b) { SONAR_QUARTERS(M, vcltq_s32(a.v[q], b.v[q])); }
SIMD F select(M m, F yes, F no) { SONAR_QUARTERS(F, vbslq_f32(m.v[q], yes.v[q], no.v[q])); }
SIMD unsigned bits_of(M m) {
  const uint32_t weights[4] = {1, 2, 4, 8};
  unsigned bits = 0;
  for (int q = 0; q < 4; ++q) bits |= vaddvq_u32(vandq_u32(m.v[q], vld1q_u32(weights))) << (4 * q);
  return bits;
}

SIMD I iset1(int32_t x) { SONAR_QUARTERS(I, vdupq_n_s32(x)); }
SIMD I iload(const void* p) {
  SONAR_QUARTERS(I, vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(p) + 16 * q)));
}
SIMD void istore(void* p, I a) {
  for (int q = 0; q < 4; ++q) vst1q_u8(static_cast<uint8_t*>(p) + 16 * q, vreinterpretq_u8_s32(a.v[q]));
}
SIMD I iota() {
  const int32_t first[4] = {0, 1, 2, 3};
  SONAR_QUARTERS(I, vaddq_s32(vld1q_s32(first), vdupq_n_s32(4 * q)));
}
SIMD I add(I a, I b) { SONAR_QUARTERS(I, vaddq_s32(a.v[q], b.v[q])); }
SIMD I sub(I a, I b) { SONAR_QUARTERS(I, vsubq_s32(a.v[q], b.v[q])); }
SIMD I mul(I a, I b) { SONAR_QUARTERS(I, vmulq_s32(a.v[q], b.v[q])); }
SIMD I bit_and(I a, I b) { SONAR_QUARTERS(I, vandq_s32(a.v[q], b.v[q])); }
SIMD I bit_or(I a, I b) { SONAR_QUARTERS(I, vorrq_s32(a.v[q], b.v[q])); }
SIMD I bit_xor(I a, I b) { SONAR_QUARTERS(I, veorq_s32(a.v[q], b.v[q])); }
SIMD I shift_left(I a, int n) { SONAR_QUARTERS(I, vshlq_s32(a.v[q], vdupq_n_s32(n))); }
SIMD I shift_right(I a, int n) {
  SONAR_QUARTERS(I, vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a.v[q]), vdupq_n_s32(-n))));
}

SIMD I round_to_int(F a) { SONAR_QUARTERS(I, vcvtnq_s32_f32(a.v[q])); }
SIMD F to_float(I a) { SONAR_QUARTERS(F, vcvtq_f32_s32(a.v[q])); }
SIMD F as_float(I a) { SONAR_QUARTERS(F, vreinterpretq_f32_s32(a.v[q])); }
SIMD I as_int(F a) { SONAR_QUARTERS(I, vreinterpretq_s32_f32(a.v[q])); }

SIMD F load_f16(const uint16_t* p) { SONAR_QUARTERS(F, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * q)))); }
SIMD void store_f16(uint16_t* p, F a) {
  for (int q = 0; q < 4; ++q) vst1_u16(p + 4 * q, vreinterpret_u16_f16(vcvt_f16_f32(a.v[q])));
}
SIMD I load_u16(const uint16_t* p) { SONAR_QUARTERS(I, vreinterpretq_s32_u32(vmovl_u16(vld1_u16(p + 4 * q)))); }
SIMD void store_low_u16(uint16_t* p, I a) {
  for (int q = 0; q < 4; ++q) vst1_u16(p + 4 * q, vmovn_u32(vreinterpretq_u32_s32(a.v[q])));
}
SIMD I load_u8(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t lo = vmovl_u8(vget_low_u8(bytes)), hi = vmovl_u8(vget_high_u8(bytes));
  return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(lo))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(lo))),
           vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(hi))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(hi)))}};
}
SIMD I load_s8(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t lo = vmovl_s8(vget_low_s8(bytes)), hi = vmovl_s8(vget_high_s8(bytes));
  return {{vmovl_s16(vget_low_s16(lo)), vmovl_s16(vget_high_s16(lo)), vmovl_s16(vget_low_s16(hi)),
           vmovl_s16(vget_high_s16(hi))}};
}
SIMD void store_low_s8(int8_t* p, I a) {
  const int16x8_t lo = vcombine_s16(vmovn_s32(a.v[0]), vmovn_s32(a.v[1]));
  const int16x8_t hi = vcombine_s16(vmovn_s32(a.v[2]), vmovn_s32(a.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
}

SIMD float reduce_add(F a) {
  const float32x4_t a4 = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t a2 = vadd_f32(vget_low_f32(a4), vget_high_f32(a4));
  return vget_lane_f32(a2, 0) + vget_lane_f32(a2, 1);
}
SIMD float reduce_max(F a) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3]))); }
SIMD int32_t reduce_add(I a) { return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3]))); }
SIMD void transpose_store(const F rows[16], float* out, int ld) {
  for (int r = 0; r < 16; ++r) {
    float lanes[16];
    store(lanes, rows[r]);
    for (int c = 0; c < 16; ++c) out[c * ld + r] = lanes[c];
  }
}

// Slices of four lanes for the integer tile; see avx512.h. Weights below 128 are the same signed or unsigned.
constexpr int kSlices = 4, kSliceLanes = 4;
using SliceF = float32x4_t;
using SliceI = int32x4_t;

SIMD SliceF slice_load(const float* p) { return vld1q_f32(p); }
SIMD void slice_store(float* p, SliceF a) { vst1q_f32(p, a); }
SIMD SliceF slice_set1(float x) { return vdupq_n_f32(x); }
SIMD SliceF slice_mul(SliceF a, SliceF b) { return vmulq_f32(a, b); }
SIMD SliceF slice_fma(SliceF a, SliceF b, SliceF c) { return vfmaq_f32(c, a, b); }
SIMD SliceF slice_to_float(SliceI a) { return vcvtq_f32_s32(a); }
SIMD SliceI slice_bytes(const uint8_t* p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
SIMD SliceI slice_iset1(int32_t x) { return vdupq_n_s32(x); }
template <int N>
SIMD SliceI slice_shift_left(SliceI a) {
  return vshlq_n_s32(a, N);
}

template <int BITS, int G>
SIMD SliceI slice_dot(SliceI start, const SliceI w[G], const int8_t* x) {
  for (int g = 0; g < G; ++g) {
    int32_t four;
    __builtin_memcpy(&four, x + 4 * g, 4);
    start = vdotq_s32(start, vreinterpretq_s8_s32(w[g]), vreinterpretq_s8_s32(vdupq_n_s32(four)));
  }
  return start;
}
