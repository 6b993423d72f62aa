// Drawing tokens: greedy, or Gumbel-max over what top-k, min-p, typical-p and top-p keep.
#pragma once

#include <cstdint>

struct SampleTask {
  const float* logits;  // (num_rows, vocab)
  int64_t stride;
  int vocab;
  const float* temperature;  // the rest is not read when all_greedy
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const float* typical_p;
  const int64_t* keys;  // (num_rows, 2)
  bool all_greedy;
  int64_t* out;
};

void sample(const SampleTask& task, int num_rows);
