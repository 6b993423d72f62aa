// Attention and whole layers: their entries in the Python module. See module.cpp.
#include "layer.h"
#include "module_arguments.h"
#include "module_methods.h"
#include "pool.h"
#include "row_ops.h"

namespace {

constexpr const char* kLayerName = "sonar.LayerPlan";

void free_layer(PyObject* capsule) { delete static_cast<LayerPlan*>(PyCapsule_GetPointer(capsule, kLayerName)); }

// The cache's address, type and byte strides (block, K or V, head, slot) and its block size.
template <class Task>
void read_cache(Arguments& a, Task& task) {
  task.cache = a.pointer<char>();
  task.cache_type = a.integer();
  task.stride_block = a.big();
  task.stride_kv = a.big();
  task.stride_head = a.big();
  task.stride_slot = a.big();
  task.block_size = a.integer();
}

// cos_sin, rotary_dim, q_norm, k_norm, norm_eps, num_heads, num_kv_heads, head_dim: constants of a layer.
void read_heads(Arguments& a, RopeTask& task) {
  task.cos_sin = a.pointer<const float>();
  task.rotary_dim = a.integer();
  task.q_norm = a.pointer<const float>();
  task.k_norm = a.pointer<const float>();
  task.norm_eps = a.real();
  task.num_heads = a.integer();
  task.num_kv_heads = a.integer();
  task.head_dim = a.integer();
}

// num_tokens, positions, cache x 7, slot_mapping: where a step's tokens go.
void read_tokens(Arguments& a, RopeTask& task, int& num_tokens) {
  num_tokens = a.integer();
  task.positions = a.pointer<const int64_t>();
  read_cache(a, task);
  task.slot_mapping = a.pointer<const int64_t>();
}

// block_table, block_table_stride, query_start, seq_lens, num_requests.
void read_requests(Arguments& a, AttentionTask& task, int& num_requests) {
  task.block_table = a.pointer<const int32_t>();
  task.block_table_stride = a.big();
  task.query_start = a.pointer<const int32_t>();
  task.seq_lens = a.pointer<const int32_t>();
  num_requests = a.integer();
}

// scale, window, softcap.
template <class Spec>
void read_scores(Arguments& a, Spec& spec) {
  spec.scale = a.real();
  spec.window = a.integer();
  spec.softcap = a.real();
}

// Attention over the cache and heads that the rotation wrote for.
AttentionTask attention_after(const RopeTask& rope) {
  AttentionTask task = {};
  task.cache = rope.cache;
  task.cache_type = rope.cache_type;
  task.stride_block = rope.stride_block;
  task.stride_kv = rope.stride_kv;
  task.stride_head = rope.stride_head;
  task.stride_slot = rope.stride_slot;
  task.block_size = rope.block_size;
  task.num_heads = rope.num_heads;
  task.num_kv_heads = rope.num_kv_heads;
  task.head_dim = rope.head_dim;
  return task;
}

int64_t attention_work(const AttentionTask& task, int num_requests) {
  int64_t pairs = 0;
  for (int r = 0; r < num_requests; ++r) {
    pairs += static_cast<int64_t>(task.query_start[r + 1] - task.query_start[r]) * task.seq_lens[r];
  }
  return pairs * task.num_heads * task.head_dim * 8;
}

}  // namespace

// rope_kv_write(qkv, qkv_stride, as read_heads, as read_tokens, q_out)
PyObject* run_rope_kv_write(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("rope_kv_write", args, count, 21);
  RopeTask task;
  int num_tokens;
  task.qkv = a.pointer<const float>();
  task.qkv_stride = a.big();
  read_heads(a, task);
  read_tokens(a, task, num_tokens);
  task.q_out = a.pointer<float>();
  if (!a.ok()) return nullptr;
  rope_kv_write(task, num_tokens);
  return a.none();
}

// attention(q, cache x 7, num_heads, num_kv_heads, head_dim, as read_requests, as read_scores, sinks, out)
PyObject* run_attention(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("attention", args, count, 21);
  AttentionTask task;
  int num_requests;
  task.q = a.pointer<const float>();
  read_cache(a, task);
  task.num_heads = a.integer();
  task.num_kv_heads = a.integer();
  task.head_dim = a.integer();
  read_requests(a, task, num_requests);
  read_scores(a, task);
  task.sinks = a.pointer<const float>();
  task.out = a.pointer<float>();
  if (!a.ok()) return nullptr;
  without_gil(attention_work(task, num_requests) > kLongCall, [&] { attention(task, num_requests); });
  return a.none();
}

// rope_attention(qkv, qkv_stride, as read_heads, as read_tokens, as read_requests, as read_scores, out): rope_kv_write
// and attention; the rotated queries stay in scratch memory.
PyObject* run_rope_attention(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("rope_attention", args, count, 29);
  RopeTask rope;
  int num_tokens, num_requests;
  rope.qkv = a.pointer<const float>();
  rope.qkv_stride = a.big();
  read_heads(a, rope);
  read_tokens(a, rope, num_tokens);
  AttentionTask task = attention_after(rope);
  read_requests(a, task, num_requests);
  read_scores(a, task);
  task.out = a.pointer<float>();
  if (!a.ok()) return nullptr;
  const size_t floats = static_cast<size_t>(num_tokens) * task.num_heads * task.head_dim;
  rope.q_out = static_cast<float*>(scratch(Scratch::kOutput, floats * sizeof(float)));
  task.q = rope.q_out;
  without_gil(attention_work(task, num_requests) > kLongCall, [&] {
    rope_kv_write(rope, num_tokens);
    attention(task, num_requests);
  });
  return a.none();
}

// layer_plan(qkv, output, gate_up, down, attention_norm, mlp_norm, norm_eps, activation, as read_heads, as
// read_scores): four linear plans, which must outlive it.
PyObject* layer_plan(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("layer_plan", args, count, 19);
  LayerPlan plan = {};
  for (const LinearPlan** linear : {&plan.qkv, &plan.output, &plan.gate_up, &plan.down}) {
    *linear = a.capsule<LinearPlan>(kPlanName);
  }
  plan.attention_norm = a.pointer<const float>();
  plan.mlp_norm = a.pointer<const float>();
  plan.norm_eps = a.real();
  plan.activation = a.integer();
  read_heads(a, plan.rope);
  read_scores(a, plan);
  if (!a.ok()) return nullptr;
  const RopeTask& heads = plan.rope;
  const bool fits = plan.qkv->k == plan.output->n && plan.output->k == heads.num_heads * heads.head_dim &&
                    plan.qkv->n == plan.output->k + 2 * heads.num_kv_heads * heads.head_dim &&
                    plan.gate_up->k == plan.qkv->k && plan.gate_up->n == 2 * plan.down->k &&
                    plan.down->n == plan.qkv->k;
  if (!fits) return PyErr_Format(PyExc_ValueError, "layer_plan: the linear layers do not fit each other");
  return PyCapsule_New(new LayerPlan(plan), kLayerName, free_layer);
}

// layer(plan, residual, as read_tokens, as read_requests)
PyObject* run_layer(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("layer", args, count, 17);
  const LayerPlan* plan = a.capsule<LayerPlan>(kLayerName);
  float* residual = a.pointer<float>();
  if (!a.ok()) return nullptr;
  RopeTask rope = plan->rope;
  int num_tokens, num_requests;
  read_tokens(a, rope, num_tokens);
  AttentionTask task = attention_after(rope);
  read_requests(a, task, num_requests);
  if (!a.ok()) return nullptr;
  task.scale = plan->scale;
  task.window = plan->window;
  task.softcap = plan->softcap;
  const int64_t weights = static_cast<int64_t>(plan->qkv->k) * (plan->qkv->n + plan->output->k + 3 * plan->down->k);
  without_gil(attention_work(task, num_requests) + (num_tokens + 4) * weights > kLongCall,
              [&] { decoder_layer(*plan, residual, num_tokens, rope, task, num_requests); });
  return a.none();
}
