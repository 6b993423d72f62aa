// Row-wise ops over many rows, spread over the pool when there is enough to do. Strides in floats.
#pragma once

#include <cstdint>

#include "tasks.h"

void rms_norm(const float* x, int64_t x_stride, const float* weight, float* out, int num_rows, int d, float eps);
// residual += x, in place; out = the norm of it.
void add_rms_norm(const float* x, int64_t x_stride, float* residual, int64_t residual_stride, const float* weight,
                  float* out, int num_rows, int d, float eps);
void layer_norm(const float* x, int64_t x_stride, const float* weight, const float* bias, float* out, int num_rows,
                int d, float eps);
// out = f(x) * up, or f(x) where up is null.
void activation(int kind, const float* x, int64_t x_stride, const float* up, float* out, int64_t out_stride,
                int num_rows, int n);
void rope_kv_write(const RopeTask& task, int num_tokens);

// Causal attention of num_requests requests; see kernels/attention.h.
void attention(const AttentionTask& task, int num_requests);
