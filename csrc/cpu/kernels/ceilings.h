// What one core can do at this level, measured with nothing in the way. For benchmarks. Included by isa.cpp.
#pragma once

// Twelve independent chains of fused multiply-adds. Returns floating-point operations done.
static double float_ceiling(int64_t rounds) {
  constexpr int chains = kGemmRows * kGemmPanels < 12 ? kGemmRows * kGemmPanels : 12;
  F sum[chains];
  for (int c = 0; c < chains; ++c) sum[c] = set1(static_cast<float>(c));
  const F x = set1(0.999f), y = set1(0.001f);
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < chains; ++c) sum[c] = fma(sum[c], x, y);
  }
  F all = sum[0];
  for (int c = 1; c < chains; ++c) all = add(all, sum[c]);
  volatile float keep = reduce_add(all);
  (void)keep;
  return static_cast<double>(rounds) * chains * kLanes * 2;
}

// Integer dot products of 4-bit weights as the tile does them, out of the first-level cache. Returns multiplications +
// additions.
static double dot_ceiling(int64_t rounds) {
  constexpr int chains = kDotRows < 8 ? kDotRows : 8;
  alignas(64) uint8_t bytes[64 * 8];
  int8_t x[32 * chains];
  for (int i = 0; i < 64 * 8; ++i) bytes[i] = static_cast<uint8_t>(i & 15);
  for (int i = 0; i < 32 * chains; ++i) x[i] = static_cast<int8_t>(i % 100);
  SliceI sum[chains];
  for (int c = 0; c < chains; ++c) sum[c] = slice_iset1(c);
#if !SONAR_ROWS_TOGETHER
  SliceI w[8];
  for (int g = 0; g < 8; ++g) w[g] = slice_bytes(bytes + 64 * g);
#endif
  for (int64_t i = 0; i < rounds; ++i) {
    x[i & 31] = static_cast<int8_t>(i & 63);
#if SONAR_ROWS_TOGETHER
    rows_dot<4, 8, chains>(sum, bytes, x);
#else
#pragma GCC unroll 8
    for (int c = 0; c < chains; ++c) sum[c] = slice_dot<4, 8>(sum[c], w, x + 32 * c);
#endif
  }
  volatile float keep = 0.0f;
  for (int c = 0; c < chains; ++c) {
    float lanes[16];
    slice_store(lanes, slice_to_float(sum[c]));
    keep = keep + lanes[0];
  }
  return static_cast<double>(rounds) * chains * kSliceLanes * 32 * 2;
}

// Reads memory once. Returns something that depends on all of it.
static uint64_t read_ceiling(const void* data, size_t bytes) {
  const char* p = static_cast<const char*>(data);
  I sum[4] = {iset1(0), iset1(0), iset1(0), iset1(0)};
  for (size_t i = 0; i + 256 <= bytes; i += 256)
    for (int c = 0; c < 4; ++c) sum[c] = bit_xor(sum[c], iload(p + i + 64 * c));
  return static_cast<uint64_t>(reduce_add(bit_xor(bit_xor(sum[0], sum[1]), bit_xor(sum[2], sum[3]))));
}
