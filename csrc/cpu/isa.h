// The kernels of one instruction set level: what isa.cpp fills in, once a level, and the scheduling code calls.
#pragma once

#include "layout.h"
#include "tasks.h"

struct IsaKernels {
  const char* name;

  // Matmul, by weight type; null where a type has none. See kernels/dot_panel.h and float_panel.h.
  void (*quantize_row)(const float* x, const QuantizedRows& out, int row);
  int gemm_rows;  // of the float kernels' register tile
  void (*dot_panels[kNumWeightTypes])(const PanelTask& task, const QuantizedRows& rows);
  void (*float_panels[kNumWeightTypes])(const PanelTask& task, const FloatRows& rows);

  void (*rms_norm_row)(const float* x, const float* weight, float* out, int d, float eps);
  void (*add_rms_norm_row)(const float* x, float* residual, const float* weight, float* out, int d, float eps);
  void (*layer_norm_row)(const float* x, const float* weight, const float* bias, float* out, int d, float eps);
  void (*activation_row)(int kind, const float* x, const float* up, float* out, int n);
  void (*rope_kv_write_token)(const RopeTask& task, int token);

  size_t (*attention_scratch_floats)(const AttentionTask& task, int num_rows);
  void (*attention_unit)(const AttentionTask& task, const AttentionUnit& unit, const AttentionUnit* next,
                         float* memory);
  void (*attention_merge)(const AttentionTask& task, const AttentionUnit& unit, float* memory);

  int (*argmax_row)(const float* x, int n);
  void (*divide_row)(const float* x, float divisor, float* out, int n);
  void (*exp_row)(const float* x, float shift, float* out, int n);
  float (*gumbel_row)(const float* scores, const int32_t* ids, int n, uint32_t key0, uint32_t key1, float* out);

  // Ceilings of one core, for benchmarks: operations done, over `rounds` rounds of register-only work.
  double (*float_ceiling)(int64_t rounds);
  double (*dot_ceiling)(int64_t rounds);
  uint64_t (*read_ceiling)(const void* data, size_t bytes);
};

// The best level this machine can run, unless another was asked for.
const IsaKernels& isa();
// Levels this build has and this machine can run, best first.
int num_isa_levels();
const char* isa_level_name(int index);
// Returns false where the name is none of them. "" means the best.
bool set_isa_level(const char* name);
