// GGUF's rows of blocks: taken apart for packing, widened for embeddings. Plain C++; runs once a matrix, or on few
// rows.
#pragma once

#include <cstddef>
#include <cstdint>

// Bytes of a stored row of k columns; 0 where k is no multiple of the type's block or the type is not known.
size_t stored_row_bytes(int type, int64_t k);

// Packs n rows of k columns (see layout.h) into out: packed_panel_bytes(type, k) times the panels, aligned to 64.
void pack_matrix(int type, const uint8_t* rows, size_t row_bytes, int n, int k, uint8_t* out);

// One stored row as float32, by the formulas of the format, each operation rounded once.
void dequantize_row(int type, const uint8_t* row, int k, float* out);
