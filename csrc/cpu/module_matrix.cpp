// Linear layers and embeddings: their entries in the Python module. See module.cpp.
#include "layout.h"
#include "linear.h"
#include "module_arguments.h"
#include "module_methods.h"
#include "pack.h"

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

namespace {

void free_plan(PyObject* capsule) { delete static_cast<LinearPlan*>(PyCapsule_GetPointer(capsule, kPlanName)); }

}  // namespace

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
