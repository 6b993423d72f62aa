#include "layer.h"

#include "layout.h"
#include "pool.h"
#include "row_ops.h"

void decoder_layer(const LayerPlan& plan, float* residual, int num_tokens, RopeTask rope, AttentionTask requests,
                   int num_requests) {
  const int64_t hidden = plan.output->n, qkv_size = plan.qkv->n, heads_size = plan.output->k, mlp_size = plan.down->k;
  const size_t rows = static_cast<size_t>(num_tokens);
  float* qkv =
      static_cast<float*>(scratch(Scratch::kLayer, rows * (qkv_size + 2 * heads_size + mlp_size) * sizeof(float)));
  float* q = qkv + rows * qkv_size;
  float* attended = q + rows * heads_size;
  float* gated = attended + rows * heads_size;

  LinearExtras normed;
  normed.norm = plan.attention_norm;
  normed.eps = plan.norm_eps;
  linear(*plan.qkv, residual, hidden, num_tokens, qkv, qkv_size, normed);

  rope.qkv = qkv;
  rope.qkv_stride = qkv_size;
  rope.q_out = q;
  rope_kv_write(rope, num_tokens);
  requests.q = q;
  requests.out = attended;
  attention(requests, num_requests);

  LinearExtras added;
  added.add = true;
  linear(*plan.output, attended, heads_size, num_tokens, residual, hidden, added);

  normed.norm = plan.mlp_norm;
  normed.activation = plan.activation;
  linear(*plan.gate_up, residual, hidden, num_tokens, gated, mlp_size, normed);
  linear(*plan.down, gated, mlp_size, num_tokens, residual, hidden, added);
}
