// Ops on rows and sampling: their entries in the Python module. See module.cpp.
#include "module_arguments.h"
#include "module_methods.h"
#include "row_ops.h"
#include "sample.h"

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
