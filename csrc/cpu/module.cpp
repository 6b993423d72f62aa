// The Python module `sonar.ops._cpu`: addresses and numbers in, nothing allocated, no tensor known.
//
// Callers (sonar/ops/cpu*.py) check shapes, types and strides; here only what would corrupt memory by a wrong constant
// is checked. Long calls release the GIL; short ones keep it, since handing it over may cost milliseconds when another
// thread is busy.
#include "isa.h"
#include "linear.h"
#include "module_arguments.h"
#include "pack.h"
#include "pool.h"
#include "row_ops.h"
#include "sample.h"

namespace {

constexpr const char* kPlanName = "sonar.LinearPlan";

// levels() -> names this machine can run, best first.
PyObject* levels(PyObject*, PyObject* const*, Py_ssize_t) {
  PyObject* names = PyTuple_New(num_isa_levels());
  for (int i = 0; names && i < num_isa_levels(); ++i) {
    PyTuple_SetItem(names, i, PyUnicode_FromString(isa_level_name(i)));
  }
  return names;
}

// level() -> the name in use.
PyObject* level(PyObject*, PyObject* const*, Py_ssize_t) { return PyUnicode_FromString(isa().name); }

// set_level(name): "" is the best. Packed weights are the same for all.
PyObject* set_level(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 1) return PyErr_Format(PyExc_TypeError, "set_level(name)");
  const char* name = PyUnicode_AsUTF8AndSize(args[0], nullptr);
  if (!name) return nullptr;
  if (!set_isa_level(name)) return PyErr_Format(PyExc_ValueError, "level %s is not among levels()", name);
  return PyUnicode_FromString(isa().name);
}

// set_num_threads(n)
PyObject* set_threads(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("set_num_threads", args, count, 1);
  const int n = a.integer();
  if (!a.ok()) return nullptr;
  set_num_threads(n);
  return a.none();
}

PyObject* threads(PyObject*, PyObject* const*, Py_ssize_t) { return PyLong_FromLongLong(num_threads()); }

// packed_bytes(type, n, k) -> bytes `pack` writes; 0 for an unknown type or a k that is no multiple of its block.
PyObject* packed_bytes(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("packed_bytes", args, count, 3);
  const int type = a.integer();
  const int64_t n = a.big(), k = a.big();
  if (!a.ok()) return nullptr;
  if (stored_row_bytes(type, k) == 0) return PyLong_FromLongLong(0);
  return PyLong_FromLongLong(static_cast<int64_t>(packed_panel_bytes(type, static_cast<int>(k))) *
                             ((n + kLanes - 1) / kLanes));
}

// pack(type, rows, row_bytes, n, k, out)
PyObject* pack(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("pack", args, count, 6);
  const int type = a.integer();
  const uint8_t* rows = a.pointer<const uint8_t>();
  const size_t row_bytes = static_cast<size_t>(a.big());
  const int n = a.integer(), k = a.integer();
  uint8_t* out = a.pointer<uint8_t>();
  if (!a.ok()) return nullptr;
  if (stored_row_bytes(type, k) == 0) return PyErr_Format(PyExc_ValueError, "pack: type %d, k %d", type, k);
  without_gil(true, [&] { pack_matrix(type, rows, row_bytes, n, k, out); });
  return a.none();
}

void free_plan(PyObject* capsule) { delete static_cast<LinearPlan*>(PyCapsule_GetPointer(capsule, kPlanName)); }

// linear_plan(k, type, int8, n, packed, bias, ...): five numbers a part.
PyObject* linear_plan(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count < 6 || (count - 1) % 5 || (count - 1) / 5 > kMaxParts) {
    return PyErr_Format(PyExc_TypeError, "linear_plan(k, (type, int8, n, packed, bias) of 1 to 8 parts)");
  }
  Arguments a("linear_plan", args, count, count);
  LinearPlan plan;
  plan.k = a.integer();
  for (Py_ssize_t i = 0; i < (count - 1) / 5; ++i) {
    LinearPart part;
    part.type = a.integer();
    part.int8 = a.integer() != 0;
    part.n = a.integer();
    part.packed = a.pointer<const uint8_t>();
    part.bias = a.pointer<const float>();
    if (stored_row_bytes(part.type, plan.k) == 0 || (part.int8 && is_plain(part.type)) || part.n < 1) {
      return PyErr_Format(PyExc_ValueError, "linear_plan: type %d, int8 %d, n %d, k %d", part.type, part.int8, part.n,
                          plan.k);
    }
    plan.n += part.n;
    plan.parts.push_back(part);
  }
  if (!a.ok()) return nullptr;
  return PyCapsule_New(new LinearPlan(plan), kPlanName, free_plan);
}

// linear(plan, x, x_stride, num_rows, y, y_stride, norm, eps, activation, add): see LinearExtras; 0, 0.0, -1, 0 for
// none.
PyObject* run_linear(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("linear", args, count, 10);
  const LinearPlan* plan = a.capsule<LinearPlan>(kPlanName);
  const float* x = a.pointer<const float>();
  const int64_t x_stride = a.big();
  const int num_rows = a.integer();
  float* y = a.pointer<float>();
  const int64_t y_stride = a.big();
  LinearExtras extras;
  extras.norm = a.pointer<const float>();
  extras.eps = a.real();
  extras.activation = a.integer();
  extras.add = a.integer() != 0;
  if (!a.ok()) return nullptr;
  without_gil(static_cast<int64_t>(num_rows + 4) * plan->n * plan->k > kLongCall,
              [&] { linear(*plan, x, x_stride, num_rows, y, y_stride, extras); });
  return a.none();
}

// embedding(type, rows, row_bytes, n, k, ids, num_ids, out)
PyObject* run_embedding(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("embedding", args, count, 8);
  const int type = a.integer();
  const uint8_t* rows = a.pointer<const uint8_t>();
  const size_t row_bytes = static_cast<size_t>(a.big());
  const int64_t n = a.big();
  const int k = a.integer();
  const int64_t* ids = a.pointer<const int64_t>();
  const int num_ids = a.integer();
  float* out = a.pointer<float>();
  if (!a.ok()) return nullptr;
  if (stored_row_bytes(type, k) == 0) return PyErr_Format(PyExc_ValueError, "embedding: type %d, k %d", type, k);
  if (!embedding(type, rows, row_bytes, n, k, ids, num_ids, out)) {
    return PyErr_Format(PyExc_IndexError, "embedding: a token id is outside [0, %lld)", static_cast<long long>(n));
  }
  return a.none();
}

// rms_norm(x, x_stride, weight, out, num_rows, d, eps)
PyObject* run_rms_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("rms_norm", args, count, 7);
  const float* x = a.pointer<const float>();
  const int64_t x_stride = a.big();
  const float* weight = a.pointer<const float>();
  float* out = a.pointer<float>();
  const int num_rows = a.integer(), d = a.integer();
  const float eps = a.real();
  if (!a.ok()) return nullptr;
  rms_norm(x, x_stride, weight, out, num_rows, d, eps);
  return a.none();
}

// add_rms_norm(x, x_stride, residual, residual_stride, weight, out, num_rows, d, eps)
PyObject* run_add_rms_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("add_rms_norm", args, count, 9);
  const float* x = a.pointer<const float>();
  const int64_t x_stride = a.big();
  float* residual = a.pointer<float>();
  const int64_t residual_stride = a.big();
  const float* weight = a.pointer<const float>();
  float* out = a.pointer<float>();
  const int num_rows = a.integer(), d = a.integer();
  const float eps = a.real();
  if (!a.ok()) return nullptr;
  add_rms_norm(x, x_stride, residual, residual_stride, weight, out, num_rows, d, eps);
  return a.none();
}

// layer_norm(x, x_stride, weight, bias, out, num_rows, d, eps)
PyObject* run_layer_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("layer_norm", args, count, 8);
  const float* x = a.pointer<const float>();
  const int64_t x_stride = a.big();
  const float* weight = a.pointer<const float>();
  const float* bias = a.pointer<const float>();
  float* out = a.pointer<float>();
  const int num_rows = a.integer(), d = a.integer();
  const float eps = a.real();
  if (!a.ok()) return nullptr;
  layer_norm(x, x_stride, weight, bias, out, num_rows, d, eps);
  return a.none();
}

// activation(kind, x, x_stride, up, out, num_rows, n)
PyObject* run_activation(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("activation", args, count, 7);
  const int kind = a.integer();
  const float* x = a.pointer<const float>();
  const int64_t x_stride = a.big();
  const float* up = a.pointer<const float>();
  float* out = a.pointer<float>();
  const int num_rows = a.integer(), n = a.integer();
  if (!a.ok()) return nullptr;
  without_gil(static_cast<int64_t>(num_rows) * n * 64 > kLongCall,
              [&] { activation(kind, x, x_stride, up, out, n, num_rows, n); });
  return a.none();
}

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

// qkv, qkv_stride, num_tokens, positions, cos_sin, rotary_dim, q_norm, k_norm, norm_eps, cache x 7, slot_mapping,
// num_heads, num_kv_heads, head_dim.
RopeTask read_rope(Arguments& a, int& num_tokens) {
  RopeTask task;
  task.qkv = a.pointer<const float>();
  task.qkv_stride = a.big();
  num_tokens = a.integer();
  task.positions = a.pointer<const int64_t>();
  task.cos_sin = a.pointer<const float>();
  task.rotary_dim = a.integer();
  task.q_norm = a.pointer<const float>();
  task.k_norm = a.pointer<const float>();
  task.norm_eps = a.real();
  read_cache(a, task);
  task.slot_mapping = a.pointer<const int64_t>();
  task.num_heads = a.integer();
  task.num_kv_heads = a.integer();
  task.head_dim = a.integer();
  return task;
}

// block_table, block_table_stride, query_start, seq_lens, num_requests, sinks, out, scale, window, softcap.
void read_requests(Arguments& a, AttentionTask& task, int& num_requests) {
  task.block_table = a.pointer<const int32_t>();
  task.block_table_stride = a.big();
  task.query_start = a.pointer<const int32_t>();
  task.seq_lens = a.pointer<const int32_t>();
  num_requests = a.integer();
  task.sinks = a.pointer<const float>();
  task.out = a.pointer<float>();
  task.scale = a.real();
  task.window = a.integer();
  task.softcap = a.real();
}

bool is_long(const AttentionTask& task, int num_requests) {
  int64_t pairs = 0;
  for (int r = 0; r < num_requests; ++r) {
    pairs += static_cast<int64_t>(task.query_start[r + 1] - task.query_start[r]) * task.seq_lens[r];
  }
  return pairs * task.num_heads * task.head_dim * 8 > kLongCall;
}

// rope_kv_write(as read_rope, q_out)
PyObject* run_rope_kv_write(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("rope_kv_write", args, count, 21);
  int num_tokens;
  RopeTask task = read_rope(a, num_tokens);
  task.q_out = a.pointer<float>();
  if (!a.ok()) return nullptr;
  rope_kv_write(task, num_tokens);
  return a.none();
}

// attention(q, cache x 7, num_heads, num_kv_heads, head_dim, as read_requests)
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
  if (!a.ok()) return nullptr;
  without_gil(is_long(task, num_requests), [&] { attention(task, num_requests); });
  return a.none();
}

// rope_attention(as read_rope, as read_requests): rope_kv_write and attention; the rotated queries stay in scratch
// memory.
PyObject* run_rope_attention(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("rope_attention", args, count, 30);
  int num_tokens, num_requests;
  RopeTask rope = read_rope(a, num_tokens);
  AttentionTask task;
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
  read_requests(a, task, num_requests);
  if (!a.ok()) return nullptr;
  const size_t floats = static_cast<size_t>(num_tokens) * task.num_heads * task.head_dim;
  rope.q_out = static_cast<float*>(scratch(Scratch::kOutput, floats * sizeof(float)));
  task.q = rope.q_out;
  without_gil(is_long(task, num_requests), [&] {
    rope_kv_write(rope, num_tokens);
    attention(task, num_requests);
  });
  return a.none();
}

// sample(logits, stride, num_rows, vocab, all_greedy, temperature, top_k, top_p, min_p, typical_p, keys, out)
PyObject* run_sample(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("sample", args, count, 12);
  SampleTask task;
  task.logits = a.pointer<const float>();
  task.stride = a.big();
  const int num_rows = a.integer();
  task.vocab = a.integer();
  task.all_greedy = a.integer() != 0;
  task.temperature = a.pointer<const float>();
  task.top_k = a.pointer<const int32_t>();
  task.top_p = a.pointer<const float>();
  task.min_p = a.pointer<const float>();
  task.typical_p = a.pointer<const float>();
  task.keys = a.pointer<const int64_t>();
  task.out = a.pointer<int64_t>();
  if (!a.ok()) return nullptr;
  without_gil(static_cast<int64_t>(num_rows) * task.vocab * (task.all_greedy ? 16 : 400) > kLongCall,
              [&] { sample(task, num_rows); });
  return a.none();
}

// float_ceiling(rounds), dot_ceiling(rounds) -> operations done by all threads together.
template <double (*IsaKernels::*KERNEL)(int64_t)>
PyObject* arithmetic_ceiling(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("ceiling", args, count, 1);
  const int64_t rounds = a.big();
  if (!a.ok()) return nullptr;
  constexpr int kPieces = 64;
  double done[kPieces];
  without_gil(true, [&] { parallel_for(kPieces, [&](int i) { done[i] = (isa().*KERNEL)(rounds / kPieces); }); });
  double sum = 0.0;
  for (double piece : done) sum += piece;
  return a.number(sum);
}

// read_ceiling(data, bytes): reads it once with all threads.
PyObject* run_read_ceiling(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a("read_ceiling", args, count, 2);
  const char* data = a.pointer<const char>();
  const int64_t bytes = a.big();
  if (!a.ok()) return nullptr;
  constexpr int64_t kPiece = 1 << 20;
  without_gil(true, [&] {
    parallel_for(static_cast<int>(bytes / kPiece), [&](int i) {
      const volatile uint64_t keep = isa().read_ceiling(data + i * kPiece, kPiece);
      static_cast<void>(keep);
    });
  });
  return a.none();
}

#define SONAR_METHOD(NAME, FUNCTION) \
  {NAME, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(FUNCTION)), kFastCall, nullptr}
PyMethodDef methods[] = {
    SONAR_METHOD("levels", levels),
    SONAR_METHOD("level", level),
    SONAR_METHOD("set_level", set_level),
    SONAR_METHOD("set_num_threads", set_threads),
    SONAR_METHOD("num_threads", threads),
    SONAR_METHOD("packed_bytes", packed_bytes),
    SONAR_METHOD("pack", pack),
    SONAR_METHOD("linear_plan", linear_plan),
    SONAR_METHOD("linear", run_linear),
    SONAR_METHOD("embedding", run_embedding),
    SONAR_METHOD("rms_norm", run_rms_norm),
    SONAR_METHOD("add_rms_norm", run_add_rms_norm),
    SONAR_METHOD("layer_norm", run_layer_norm),
    SONAR_METHOD("activation", run_activation),
    SONAR_METHOD("rope_kv_write", run_rope_kv_write),
    SONAR_METHOD("attention", run_attention),
    SONAR_METHOD("rope_attention", run_rope_attention),
    SONAR_METHOD("sample", run_sample),
    SONAR_METHOD("float_ceiling", arithmetic_ceiling<&IsaKernels::float_ceiling>),
    SONAR_METHOD("dot_ceiling", arithmetic_ceiling<&IsaKernels::dot_ceiling>),
    SONAR_METHOD("read_ceiling", run_read_ceiling),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {{{1, nullptr}, nullptr, 0, nullptr},
                          "_cpu",
                          "CPU kernels; see sonar/ops/_cpu.pyi.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__cpu() {
  return PyModule_Create2(&definition, kStableAbiVersion);
}
