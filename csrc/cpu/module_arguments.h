// Reading the numbers a Python call hands in, and letting go of the GIL. Used by module*.cpp alone.
#pragma once

#include <climits>
#include <cstdint>

#include "python_abi.h"

// Operations (of a multiply-add's cost) from which a call takes long enough, some 100 us, to let others have the GIL.
constexpr int64_t kLongCall = 40 * 1000 * 1000;

// Takes the arguments in order; the first wrong one leaves a Python error and ok() false.
class Arguments {
 public:
  Arguments(const char* name, PyObject* const* args, Py_ssize_t count, Py_ssize_t wanted) : name_(name), next_(args) {
    if (count == wanted) return;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, count);
    failed_ = true;
  }

  int64_t big() { return failed_ ? 0 : PyLong_AsLongLong(*next_++); }
  int integer() {
    const int64_t value = big();
    if (value < INT_MIN || value > INT_MAX) {
      PyErr_Format(PyExc_ValueError, "%s: %lld does not fit 32 bits", name_, static_cast<long long>(value));
      failed_ = true;
    }
    return static_cast<int>(value);
  }
  float real() { return failed_ ? 0.0f : static_cast<float>(PyFloat_AsDouble(*next_++)); }
  template <class T>
  T* pointer() {
    return reinterpret_cast<T*>(static_cast<intptr_t>(big()));
  }
  template <class T>
  T* capsule(const char* kind) {
    return failed_ ? nullptr : static_cast<T*>(PyCapsule_GetPointer(*next_++, kind));
  }

  bool ok() const { return !failed_ && PyErr_Occurred() == nullptr; }
  PyObject* none() const {
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
  }
  PyObject* number(double value) const { return PyFloat_FromDouble(value); }

 private:
  const char* name_;
  PyObject* const* next_;
  bool failed_ = false;
};

// Runs body, and lets other Python threads run meanwhile if `is_long`. Nothing of Python may be touched in it.
template <class Body>
void without_gil(bool is_long, const Body& body) {
  void* const state = is_long ? PyEval_SaveThread() : nullptr;
  body();
  if (state) PyEval_RestoreThread(state);
}
