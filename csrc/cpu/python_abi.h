// The few names of Python's stable ABI (PEP 384, since 3.11) that the module uses, declared here.
//
// So that the kernels build wherever there is a C++ compiler: many distributions' Python comes without its headers, and
// the stable ABI promises these very layouts and signatures for every later Python 3.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

using Py_ssize_t = ptrdiff_t;
struct PyTypeObject;
struct PyObject {
  Py_ssize_t ob_refcnt;
  PyTypeObject* ob_type;
};

using PyCFunction = PyObject* (*)(PyObject* self, PyObject* args);
struct PyMethodDef {
  const char* ml_name;
  PyCFunction ml_meth;
  int ml_flags;
  const char* ml_doc;
};
struct PyModuleDef_Base {
  PyObject ob_base;
  PyObject* (*m_init)();
  Py_ssize_t m_index;
  PyObject* m_copy;
};
struct PyModuleDef {
  PyModuleDef_Base m_base;
  const char* m_name;
  const char* m_doc;
  Py_ssize_t m_size;
  PyMethodDef* m_methods;
  void* m_slots;
  void* m_traverse;
  void* m_clear;
  void* m_free;
};

constexpr int kFastCall = 0x0080;     // METH_FASTCALL
constexpr int kStableAbiVersion = 3;  // PYTHON_ABI_VERSION

PyObject* PyModule_Create2(PyModuleDef* definition, int api_version);
long long PyLong_AsLongLong(PyObject* object);
PyObject* PyLong_FromLongLong(long long value);
double PyFloat_AsDouble(PyObject* object);
PyObject* PyFloat_FromDouble(double value);
PyObject* PyUnicode_FromString(const char* text);
const char* PyUnicode_AsUTF8AndSize(PyObject* object, Py_ssize_t* size);
PyObject* PyTuple_New(Py_ssize_t size);
int PyTuple_SetItem(PyObject* tuple, Py_ssize_t index, PyObject* item);
PyObject* PyCapsule_New(void* pointer, const char* name, void (*destructor)(PyObject*));
void* PyCapsule_GetPointer(PyObject* capsule, const char* name);
PyObject* PyErr_Format(PyObject* exception, const char* format, ...);
PyObject* PyErr_Occurred();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void* state);

void Py_IncRef(PyObject* object);

extern PyObject _Py_NoneStruct;
extern PyObject* PyExc_ValueError;
extern PyObject* PyExc_TypeError;
extern PyObject* PyExc_IndexError;
}
