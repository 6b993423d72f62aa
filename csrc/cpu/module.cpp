// The Python module `sonar.ops._cpu`: addresses and numbers in, nothing allocated, no tensor known.
//
// Callers (sonar/ops/cpu*.py) check shapes, types and strides; here only what would corrupt memory by a wrong constant
// is checked. Long calls release the GIL; short ones keep it, since handing it over may cost milliseconds when another
// thread is busy.
#include "isa.h"
#include "module_arguments.h"
#include "module_methods.h"
#include "pool.h"

namespace {

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
    SONAR_METHOD("layer_plan", layer_plan),
    SONAR_METHOD("layer", run_layer),
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
