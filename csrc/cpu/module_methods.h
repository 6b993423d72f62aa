// The functions of the Python module that live outside module.cpp, one file a kind of op.
#pragma once

#include "python_abi.h"

constexpr const char* kPlanName = "sonar.LinearPlan";

// module_matrix.cpp
PyObject* packed_bytes(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* pack(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* linear_plan(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* run_linear(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* run_embedding(PyObject*, PyObject* const* args, Py_ssize_t count);

// module_rows.cpp
PyObject* run_rms_norm(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* run_add_rms_norm(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* run_layer_norm(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* run_activation(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* run_sample(PyObject*, PyObject* const* args, Py_ssize_t count);

// module_attention.cpp
PyObject* run_rope_kv_write(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* run_attention(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* run_rope_attention(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* layer_plan(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* run_layer(PyObject*, PyObject* const* args, Py_ssize_t count);
