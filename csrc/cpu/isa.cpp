// One instruction set level: compiled once for each, with that level's flags and SONAR_ISA set to its name.
//
// Everything but the table has internal linkage, and no standard library header with inline functions comes in (but in
// the portable level): the linker must never give this level's code to a caller on an older machine.
#include "isa.h"

// System headers of simd/*.h come first: inside the namespace below their guards make them vanish.
#if defined(SONAR_ISA_AVX512) || defined(SONAR_ISA_AVX2)
#include <immintrin.h>
#elif defined(SONAR_ISA_NEON)
#include <arm_neon.h>
#else
#include <cmath>

#include "half.h"
#endif

namespace {
#if defined(SONAR_ISA_AVX512)
#include "simd/avx512.h"
#elif defined(SONAR_ISA_AVX2)
#include "simd/avx2.h"
#elif defined(SONAR_ISA_NEON)
#include "simd/neon.h"
#else
#include "simd/portable.h"
#endif

#include "kernels/attention.h"
#include "kernels/ceilings.h"
#include "kernels/dot_panel.h"
#include "kernels/draw.h"
#include "kernels/float_panel.h"
#include "kernels/rows.h"
}  // namespace

#define SONAR_CONCAT2(a, b) a##b
#define SONAR_CONCAT(a, b) SONAR_CONCAT2(a, b)
#define SONAR_STRING2(a) #a
#define SONAR_STRING(a) SONAR_STRING2(a)

IsaKernels SONAR_CONCAT(make_isa_, SONAR_ISA)() {
  IsaKernels k = {};
  k.name = SONAR_STRING(SONAR_ISA);
  k.quantize_row = quantize_row;
  k.gemm_rows = kGemmRows;
#define SONAR_QUANTIZED(TYPE)            \
  k.dot_panels[TYPE] = dot_panels<TYPE>; \
  k.float_panels[TYPE] = float_panels<TYPE>
  SONAR_QUANTIZED(kQ4_0);
  SONAR_QUANTIZED(kQ4_1);
  SONAR_QUANTIZED(kQ5_0);
  SONAR_QUANTIZED(kQ5_1);
  SONAR_QUANTIZED(kQ8_0);
  SONAR_QUANTIZED(kQ2_K);
  SONAR_QUANTIZED(kQ3_K);
  SONAR_QUANTIZED(kQ4_K);
  SONAR_QUANTIZED(kQ5_K);
  SONAR_QUANTIZED(kQ6_K);
  k.float_panels[kF32] = float_panels<kF32>;
  k.float_panels[kF16] = float_panels<kF16>;
  k.float_panels[kBF16] = float_panels<kBF16>;
  k.rms_norm_row = rms_norm_row;
  k.add_rms_norm_row = add_rms_norm_row;
  k.layer_norm_row = layer_norm_row;
  k.activation_row = activation_row_of;
  k.rope_kv_write_token = rope_kv_write_token;
  k.attention_scratch_floats = attention_scratch_floats;
  k.attention_unit = attention_unit;
  k.attention_merge = attention_merge;
  k.argmax_row = argmax_row;
  k.divide_row = divide_row;
  k.exp_row = exp_row;
  k.gumbel_row = gumbel_row;
  k.float_ceiling = float_ceiling;
  k.dot_ceiling = dot_ceiling;
  k.read_ceiling = read_ceiling;
  return k;
}
