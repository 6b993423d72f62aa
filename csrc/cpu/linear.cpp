#include "linear.h"

#include <algorithm>
#include <atomic>

#include "isa.h"
#include "pack.h"
#include "pool.h"
#include "row_ops.h"

namespace {

constexpr int kRowBlock = kMaxBlockRows;   // rows a chunk computes, about: their 8-bit form fits the second-level cache
constexpr int kGatedRows = 4 * kRowBlock;  // rows whose gate and up are held at a time
constexpr int64_t kChunkWork = 1 << 21;    // multiply-adds worth handing to a thread
constexpr int64_t kChunkBytes = 24 * 1024;  // packed bytes worth a claim, when rows are few
constexpr int kFewRows = 4;
// Rows to normalize and quantize at a time: whole tiles of every kind (16, 12, 6, 4), since rows of one share cache
// lines.
constexpr int kPrepareRows = 48;

// Pieces of one buffer, each on a cache line of its own.
class Carver {
 public:
  template <class T>
  T* take(size_t count) {
    T* piece = reinterpret_cast<T*>(memory_ + used_);
    used_ += round_up(count * sizeof(T), 64);
    return piece;
  }
  void start(void* memory) {
    memory_ = static_cast<char*>(memory);
    used_ = 0;
  }
  size_t used() const { return used_; }

 private:
  char* memory_ = nullptr;
  size_t used_ = 0;
};

// The forms of the activations that a plan's parts read.
struct Activations {
  QuantizedRows quantized = {};
  FloatRows floats = {};
  float* tiled = nullptr;  // where floats.x is to be written, or null where x serves as it is
};

// A tile's rows in memory: as many as some register tile has.
int tile_rows(int num_rows) {
  int rows = 1;
  while (rows < num_rows && rows < kTileRows) rows *= 2;
  return rows;
}

// The buffers that a call of this shape needs; called first to count, then to place them.
Activations carve(Carver& carver, const LinearPlan& plan, int num_rows, bool is_normed) {
  bool any_int8 = false, any_float = false;
  for (const LinearPart& part : plan.parts) (part.int8 ? any_int8 : any_float) = true;
  Activations in;
  if (any_int8) {
    const int rows = tile_rows(num_rows), num_blocks = plan.k / kBlock;
    const size_t blocks = round_up(num_rows, rows) * num_blocks;
    in.quantized.q = carver.take<int8_t>(blocks * kBlock);
    in.quantized.scale = carver.take<float>(blocks);
    in.quantized.scaled_sum = carver.take<float>(blocks);
    in.quantized.negative_sum = carver.take<int32_t>(blocks);
    in.quantized.scaled_sum16 = carver.take<float>(2 * blocks);
    in.quantized.negative_sum16 = carver.take<int32_t>(2 * blocks);
    in.quantized.rows = rows;
    in.quantized.num_blocks = num_blocks;
  }
  if (any_float) {
    in.floats.rows = num_rows <= kFewRows ? num_rows : isa().gemm_rows;
    if (num_rows > 1 || is_normed) in.tiled = carver.take<float>(round_up(num_rows, in.floats.rows) * plan.k);
  }
  return in;
}

void fill_row(const Activations& in, const float* x, int row, int k, const LinearExtras& extras) {
  if (extras.norm) {
    float* normed = static_cast<float*>(scratch(Scratch::kChunk, k * sizeof(float)));
    isa().rms_norm_row(x, extras.norm, normed, k, extras.eps);
    x = normed;
  }
  if (in.quantized.q) isa().quantize_row(x, in.quantized, row);
  if (!in.tiled) return;
  const int rows = in.floats.rows;
  float* out = in.tiled + static_cast<size_t>(row / rows) * rows * k + row % rows;
  for (int i = 0; i < k; ++i) out[static_cast<size_t>(i) * rows] = x[i];
}

// Zeros in the rows of a lone tile that no input fills: the kernels compute them along.
void clear_rows(const QuantizedRows& tile, int first) {
  for (int b = 0; b < tile.num_blocks; ++b) {
    for (int row = first; row < tile.rows; ++row) {
      const int at = b * tile.rows + row;
      std::fill_n(tile.q + static_cast<int64_t>(at) * kBlock, kBlock, int8_t{0});
      tile.scale[at] = tile.scaled_sum[at] = 0.0f;
      tile.negative_sum[at] = 0;
      for (int half = 0; half < 2; ++half) {
        tile.scaled_sum16[(2 * b + half) * tile.rows + row] = 0.0f;
        tile.negative_sum16[(2 * b + half) * tile.rows + row] = 0;
      }
    }
  }
}

// Normalizes, quantizes and tiles the rows as asked and as the parts need them, in the calling thread's scratch memory.
Activations prepare(const LinearPlan& plan, const float* x, int64_t x_stride, int num_rows,
                    const LinearExtras& extras) {
  Carver carver;
  carve(carver, plan, num_rows, extras.norm != nullptr);
  carver.start(scratch(Scratch::kCall, carver.used()));
  Activations in = carve(carver, plan, num_rows, extras.norm != nullptr);
  in.floats.x = in.tiled ? in.tiled : x;
  parallel_for((num_rows + kPrepareRows - 1) / kPrepareRows, [&](int chunk) {
    const int end = std::min(num_rows, (chunk + 1) * kPrepareRows);
    for (int row = chunk * kPrepareRows; row < end; ++row) fill_row(in, x + row * x_stride, row, plan.k, extras);
  });
  if (in.quantized.q && num_rows < in.quantized.rows) clear_rows(in.quantized, num_rows);
  return in;
}

// One part's chunks: blocks of rows times groups of panels.
struct PartChunks {
  int column;  // of y
  int num_panels;
  int group;  // panels a chunk
  int num_groups;
  int block_rows;
  int num_blocks;
  int first_chunk;

  int count() const { return num_groups * num_blocks; }
};

int panels_per_chunk(const LinearPart& part, int k, const PartChunks& c) {
  const int64_t work = static_cast<int64_t>(kLanes) * k * c.block_rows;
  const int64_t bytes = static_cast<int64_t>(packed_panel_bytes(part.type, k));
  const int64_t worthwhile = c.block_rows > kFewRows ? kChunkWork / work : kChunkBytes / bytes;
  // Some chunks a thread, so that all end together; as many panels as the kernels take together.
  const int64_t fair = static_cast<int64_t>(c.num_panels) * c.num_blocks / (4 * num_threads());
  const int tile = part.int8 ? 1 : c.block_rows > kFewRows ? 2 : 4;
  const int64_t group = std::max<int64_t>(std::min(worthwhile, fair) / tile, 1) * tile;
  return static_cast<int>(std::min<int64_t>(group, c.num_panels));
}

PartChunks cut_part(const LinearPart& part, int k, int num_rows, int column, int first_chunk) {
  PartChunks c;
  c.column = column;
  c.first_chunk = first_chunk;
  c.num_panels = (part.n + kLanes - 1) / kLanes;
  const int tile = part.int8 ? kTileRows : isa().gemm_rows;
  c.block_rows = std::min(num_rows, kRowBlock / tile * tile);
  c.num_blocks = (num_rows + c.block_rows - 1) / c.block_rows;
  c.group = panels_per_chunk(part, k, c);
  c.num_groups = (c.num_panels + c.group - 1) / c.group;
  return c;
}

void multiply(const LinearPlan& plan, const Activations& in, int num_rows, float* y, int64_t y_stride, bool add) {
  PartChunks cut[kMaxParts];
  const int num_parts = static_cast<int>(plan.parts.size());
  int num_chunks = 0, column = 0;
  for (int i = 0; i < num_parts; ++i) {
    cut[i] = cut_part(plan.parts[i], plan.k, num_rows, column, num_chunks);
    num_chunks += cut[i].count();
    column += plan.parts[i].n;
  }
  parallel_for(num_chunks, [&](int chunk) {
    int i = num_parts - 1;
    while (cut[i].first_chunk > chunk) --i;
    const PartChunks& c = cut[i];
    const LinearPart& part = plan.parts[i];
    const int panel = (chunk - c.first_chunk) % c.num_groups * c.group;
    PanelTask task;
    task.panel_stride = packed_panel_bytes(part.type, plan.k);
    task.panels = part.packed + panel * task.panel_stride;
    task.num_panels = std::min(c.group, c.num_panels - panel);
    task.k = plan.k;
    task.first_row = (chunk - c.first_chunk) / c.num_groups * c.block_rows;
    task.num_rows = std::min(c.block_rows, num_rows - task.first_row);
    task.y = y + task.first_row * y_stride + c.column + panel * kLanes;
    task.y_stride = static_cast<size_t>(y_stride);
    task.num_columns = part.n - panel * kLanes;
    task.bias = part.bias ? part.bias + panel * kLanes : nullptr;
    task.add = add;
    task.scratch = scratch(Scratch::kChunk, kPanelScratchBytes);
    part.int8 ? isa().dot_panels[part.type](task, in.quantized) : isa().float_panels[part.type](task, in.floats);
  });
}

}  // namespace

void linear(const LinearPlan& plan, const float* x, int64_t x_stride, int num_rows, float* y, int64_t y_stride,
            const LinearExtras& extras) {
  if (num_rows < 1) return;
  if (extras.activation < 0) {
    const Activations in = prepare(plan, x, x_stride, num_rows, extras);
    return multiply(plan, in, num_rows, y, y_stride, extras.add);
  }
  for (int row = 0; row < num_rows; row += kGatedRows) {
    const int rows = std::min(kGatedRows, num_rows - row), half = plan.n / 2;
    float* both = static_cast<float*>(scratch(Scratch::kOutput, static_cast<size_t>(rows) * plan.n * sizeof(float)));
    multiply(plan, prepare(plan, x + row * x_stride, x_stride, rows, extras), rows, both, plan.n, false);
    activation(extras.activation, both, plan.n, both + half, y + row * y_stride, y_stride, rows, half);
  }
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
