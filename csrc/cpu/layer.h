// A whole decoder layer in one call, for steps of few tokens: at one token the calls between kernels cost as much time
// as a fifth of the weights' bytes. Bits are those of the single ops.
#pragma once

#include "linear.h"
#include "tasks.h"

// What is constant for a layer. Owns nothing it points to.
struct LayerPlan {
  const LinearPlan* qkv;
  const LinearPlan* output;
  const LinearPlan* gate_up;
  const LinearPlan* down;
  const float* attention_norm;
  const float* mlp_norm;
  float norm_eps;
  int activation;  // an ActivationKind
  RopeTask rope;   // its constants: heads, norms, rotation
  float scale;
  int window;
  float softcap;
};

// residual += attention(norm(residual)); residual += mlp(norm(residual)). The step's parts of `rope` (positions, slots,
// cache) and of `requests` (table, lengths, cache) are the caller's; the rest of both comes from the plan.
void decoder_layer(const LayerPlan& plan, float* residual, int num_tokens, RopeTask rope, AttentionTask requests,
                   int num_requests);
