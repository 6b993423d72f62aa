// Linear layers over packed weights, and look-ups of stored rows. Scheduling only; the arithmetic is in kernels/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

struct LinearPart {
  int type;
  bool int8;  // activations in 8 bits; quantized types only
  int n;
  const uint8_t* packed;
  const float* bias;  // of this part's columns, or null
};

constexpr int kMaxParts = 8;

// Matrices with the same inputs, stacked along the outputs. Owns nothing it points to.
struct LinearPlan {
  int k = 0;
  int n = 0;
  std::vector<LinearPart> parts;
};

// What a linear layer does besides. Bits are those of the single ops.
struct LinearExtras {
  const float* norm = nullptr;  // x becomes rms_norm(x) * norm first
  float eps = 0.0f;
  int activation = -1;  // an ActivationKind: the outputs' first half goes through it and multiplies the second
  bool add = false;     // y += rather than y =
};

// y[t, :] = x[t, :] W^T + bias, for num_rows rows; strides in floats. With an activation y has half as many columns.
void linear(const LinearPlan& plan, const float* x, int64_t x_stride, int num_rows, float* y, int64_t y_stride,
            const LinearExtras& extras);

// out[t, :] = stored row ids[t] of n rows, as float32. Returns false where an id is out of range.
bool embedding(int type, const uint8_t* rows, size_t row_bytes, int64_t n, int k, const int64_t* ids, int num_ids,
               float* out);
