#include "row_ops.h"

#include <algorithm>

#include "isa.h"
#include "pool.h"

namespace {

// Runs body(row) for all rows, some 16 K elements a chunk: a microsecond or more of work.
template <class Body>
void for_rows(int num_rows, int64_t row_elements, const Body& body) {
  const int per_chunk = static_cast<int>(std::max<int64_t>(1, 16 * 1024 / std::max<int64_t>(row_elements, 1)));
  parallel_for((num_rows + per_chunk - 1) / per_chunk, [&](int chunk) {
    const int end = std::min(num_rows, (chunk + 1) * per_chunk);
    for (int row = chunk * per_chunk; row < end; ++row) body(row);
  });
}

}  // namespace

void rms_norm(const float* x, int64_t x_stride, const float* weight, float* out, int num_rows, int d, float eps) {
  const auto kernel = isa().rms_norm_row;
  for_rows(num_rows, d,
           [&](int row) { kernel(x + row * x_stride, weight, out + static_cast<int64_t>(row) * d, d, eps); });
}

void add_rms_norm(const float* x, int64_t x_stride, float* residual, int64_t residual_stride, const float* weight,
                  float* out, int num_rows, int d, float eps) {
  const auto kernel = isa().add_rms_norm_row;
  for_rows(num_rows, d, [&](int row) {
    kernel(x + row * x_stride, residual + row * residual_stride, weight, out + static_cast<int64_t>(row) * d, d, eps);
  });
}

void layer_norm(const float* x, int64_t x_stride, const float* weight, const float* bias, float* out, int num_rows,
                int d, float eps) {
  const auto kernel = isa().layer_norm_row;
  for_rows(num_rows, d,
           [&](int row) { kernel(x + row * x_stride, weight, bias, out + static_cast<int64_t>(row) * d, d, eps); });
}

void activation(int kind, const float* x, int64_t x_stride, const float* up, float* out, int64_t out_stride,
                int num_rows, int n) {
  const auto kernel = isa().activation_row;
  for_rows(num_rows, 4 * static_cast<int64_t>(n), [&](int row) {
    kernel(kind, x + row * x_stride, up ? up + row * x_stride : nullptr, out + row * out_stride, n);
  });
}

void rope_kv_write(const RopeTask& task, int num_tokens) {
  const auto kernel = isa().rope_kv_write_token;
  for_rows(num_tokens, (task.num_heads + 2 * task.num_kv_heads) * static_cast<int64_t>(task.head_dim),
           [&](int token) { kernel(task, token); });
}
