#include "linear.h"

#include <algorithm>
#include <atomic>

#include "isa.h"
#include "pack.h"
#include "pool.h"

namespace {

constexpr int kRowBlock = 128;              // rows a chunk computes: their 8-bit form stays in the second-level cache
constexpr int64_t kChunkWork = 1 << 21;     // multiply-adds worth handing to a thread
constexpr int64_t kChunkBytes = 48 * 1024;  // packed bytes worth handing to a thread, when rows are few

// Strides that are odd multiples of a cache line: powers of two would put a tile's rows in the same cache set.
size_t odd_lines(size_t bytes) { return round_up(bytes, 64) | 64; }

struct Activations {
  const float* x;
  size_t x_stride;
  QuantizedRows rows;
};

// Rows to 8 bits in the calling thread's scratch.
QuantizedRows quantize(const float* x, int64_t x_stride, int num_rows, int k) {
  const size_t q_stride = odd_lines(k), meta_stride = odd_lines(quantized_meta_floats(k) * 4) / 4;
  int8_t* q = static_cast<int8_t*>(scratch(Scratch::kCall, num_rows * (q_stride + meta_stride * 4)));
  float* meta = reinterpret_cast<float*>(q + num_rows * q_stride);
  const int rows_per_chunk = std::max<int>(1, static_cast<int>(32 * 1024 / k));
  const auto quantize_row = isa().quantize_row;
  parallel_for((num_rows + rows_per_chunk - 1) / rows_per_chunk, [&](int chunk) {
    const int end = std::min(num_rows, (chunk + 1) * rows_per_chunk);
    for (int r = chunk * rows_per_chunk; r < end; ++r) {
      quantize_row(x + r * x_stride, k, q + r * q_stride, meta + r * meta_stride);
    }
  });
  return {q, q_stride, meta, meta_stride};
}

// One part's chunks: blocks of rows times groups of panels.
struct PartChunks {
  const LinearPart* part;
  int column;  // of y
  int num_panels;
  int group;  // panels a chunk
  int num_groups;
  int first_chunk;
};

int panels_per_chunk(const LinearPart& part, int k, int block_rows, int num_blocks, int num_panels) {
  const int64_t work = static_cast<int64_t>(kLanes) * k * block_rows;
  const int64_t by_bytes = kChunkBytes / static_cast<int64_t>(packed_panel_bytes(part.type, k));
  int64_t group = std::max(block_rows > 4 ? kChunkWork / work : by_bytes, static_cast<int64_t>(1));
  // At least some chunks a thread, so that they end together; whole register tiles of four panels where possible.
  const int64_t fair = static_cast<int64_t>(num_panels) * num_blocks / (4 * num_threads());
  group = std::min(group, std::max(fair, static_cast<int64_t>(1)));
  if (group > 4) group = group / 4 * 4;
  return static_cast<int>(std::min<int64_t>(group, num_panels));
}

}  // namespace

void linear(const LinearPlan& plan, const float* x, int64_t x_stride, int num_rows, float* y, int64_t y_stride) {
  if (num_rows < 1) return;
  Activations in = {x, static_cast<size_t>(x_stride), {}};
  if (std::any_of(plan.parts.begin(), plan.parts.end(), [](const LinearPart& part) { return part.int8; })) {
    in.rows = quantize(x, x_stride, num_rows, plan.k);
  }
  const int block_rows = std::min(num_rows, kRowBlock), num_blocks = (num_rows + block_rows - 1) / block_rows;
  constexpr int kMaxParts = 8;
  PartChunks chunks[kMaxParts];
  int num_chunks = 0, column = 0;
  const int num_parts = static_cast<int>(plan.parts.size());
  for (int i = 0; i < num_parts; ++i) {
    const LinearPart& part = plan.parts[i];
    const int num_panels = (part.n + kLanes - 1) / kLanes;
    const int group = panels_per_chunk(part, plan.k, block_rows, num_blocks, num_panels);
    const int num_groups = (num_panels + group - 1) / group;
    chunks[i] = {&part, column, num_panels, group, num_groups, num_chunks};
    num_chunks += num_groups * num_blocks;
    column += part.n;
  }
  parallel_for(num_chunks, [&](int chunk) {
    int i = num_parts - 1;
    while (chunks[i].first_chunk > chunk) --i;
    const PartChunks& c = chunks[i];
    const LinearPart& part = *c.part;
    const int block = (chunk - c.first_chunk) / c.num_groups, group = (chunk - c.first_chunk) % c.num_groups;
    const int row = block * block_rows, panel = group * c.group;
    PanelTask task;
    task.panel_stride = packed_panel_bytes(part.type, plan.k);
    task.panels = part.packed + panel * task.panel_stride;
    task.num_panels = std::min(c.group, c.num_panels - panel);
    task.k = plan.k;
    task.num_rows = std::min(block_rows, num_rows - row);
    task.y = y + row * y_stride + c.column + panel * kLanes;
    task.y_stride = static_cast<size_t>(y_stride);
    task.num_columns = part.n - panel * kLanes;
    task.bias = part.bias ? part.bias + panel * kLanes : nullptr;
    task.scratch = scratch(Scratch::kChunk, kPanelScratchBytes);
    if (part.int8) {
      QuantizedRows rows = in.rows;
      rows.q += row * rows.q_stride;
      rows.meta += row * rows.meta_stride;
      isa().dot_panels[part.type](task, rows);
    } else {
      isa().float_panels[part.type](task, in.x + row * in.x_stride, in.x_stride);
    }
  });
}

bool embedding(int type, const uint8_t* rows, size_t row_bytes, int64_t n, int k, const int64_t* ids, int num_ids,
               float* out) {
  std::atomic<bool> in_range{true};
  const int per_chunk = std::max(1, 16 * 1024 / k);
  parallel_for((num_ids + per_chunk - 1) / per_chunk, [&](int chunk) {
    const int end = std::min(num_ids, (chunk + 1) * per_chunk);
    for (int i = chunk * per_chunk; i < end; ++i) {
      if (ids[i] < 0 || ids[i] >= n) {
        in_range.store(false, std::memory_order_relaxed);
        continue;
      }
      dequantize_row(type, rows + ids[i] * row_bytes, k, out + static_cast<int64_t>(i) * k);
    }
  });
  return in_range.load();
}
