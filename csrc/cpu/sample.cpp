#include "sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "half.h"
#include "isa.h"
#include "pool.h"

namespace {

constexpr int kBucketBits = 12;

// Tokens still in play, in ascending order of their ids; arrays of the vocabulary's size in scratch memory.
struct Candidates {
  int32_t* id;
  float* score;   // logit / temperature
  float* weight;  // e^(score - largest score)
  uint32_t* key;  // order of a filter: smaller is better
  int count;
};

uint32_t ascending_key(float x) {
  const uint32_t bits = bits_from_float(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Keeps the candidates before which, in the order of their keys (then ids), less than `target` of mass lies.
// With weigh false each counts 1. Linear time: only the bucket of keys in which the target falls is sorted.
void keep_prefix(Candidates& c, bool weigh, double target) {
  constexpr int num_buckets = 1 << kBucketBits;
  thread_local double mass[num_buckets];
  std::fill(mass, mass + num_buckets, 0.0);
  const auto mass_of = [&](int i) { return weigh ? static_cast<double>(c.weight[i]) : 1.0; };
  const auto bucket_of = [&](int i) { return c.key[i] >> (32 - kBucketBits); };
  for (int i = 0; i < c.count; ++i) mass[bucket_of(i)] += mass_of(i);
  double before = 0.0;
  uint32_t bucket = 0;
  while (bucket + 1 < num_buckets && before + mass[bucket] < target) before += mass[bucket++];
  // The crossing bucket's members in order, to find the last (key, id) that stays.
  thread_local std::vector<int> members;
  members.clear();
  for (int i = 0; i < c.count; ++i)
    if (bucket_of(i) == bucket) members.push_back(i);
  std::sort(members.begin(), members.end(),
            [&](int a, int b) { return c.key[a] != c.key[b] ? c.key[a] < c.key[b] : a < b; });
  uint32_t last_key = 0;
  int last_index = -1;  // nothing of this bucket
  for (int i : members) {
    if (before >= target) break;
    last_key = c.key[i];
    last_index = i;
    before += mass_of(i);
  }
  int kept = 0;
  for (int i = 0; i < c.count; ++i) {
    const bool stays = bucket_of(i) != bucket
                           ? bucket_of(i) < bucket
                           : last_index >= 0 && (c.key[i] < last_key || (c.key[i] == last_key && i <= last_index));
    if (!stays) continue;
    c.id[kept] = c.id[i];
    c.score[kept] = c.score[i];
    c.weight[kept] = c.weight[i];
    ++kept;
  }
  c.count = kept;
}

double total_weight(const Candidates& c) {
  double total = 0.0;
  for (int i = 0; i < c.count; ++i) total += c.weight[i];
  return total;
}

void key_by_score(Candidates& c) {
  for (int i = 0; i < c.count; ++i) c.key[i] = ~ascending_key(c.score[i]);
}

void keep_min_p(Candidates& c, float min_p) {
  int kept = 0;
  for (int i = 0; i < c.count; ++i) {
    if (c.weight[i] < min_p && c.weight[i] < 1.0f) continue;  // the likeliest, of weight 1, always stays
    c.id[kept] = c.id[i];
    c.score[kept] = c.score[i];
    c.weight[kept] = c.weight[i];
    ++kept;
  }
  c.count = kept;
}

void keep_typical(Candidates& c, float largest, float typical_p) {
  const double total = total_weight(c), log_total = std::log(total);
  double entropy = 0.0;
  for (int i = 0; i < c.count; ++i) {
    entropy += c.weight[i] / total * (log_total - (static_cast<double>(c.score[i]) - largest));
  }
  for (int i = 0; i < c.count; ++i) {
    const double surprise = log_total - (static_cast<double>(c.score[i]) - largest);
    c.key[i] = ascending_key(static_cast<float>(std::fabs(surprise - entropy)));
  }
  keep_prefix(c, true, typical_p * total);
}

uint32_t mix(uint32_t h) {
  h = (h ^ h >> 16) * 0x85ebca6bu;
  h = (h ^ h >> 13) * 0xc2b2ae35u;
  return h ^ h >> 16;
}

float gumbel(uint32_t token, uint32_t key0, uint32_t key1) {
  const uint32_t h = mix(mix(token * 0x9e3779b1u + key0) ^ key1);
  const double u = (static_cast<double>(h >> 8) + 0.5) * 0x1p-24;
  return static_cast<float>(-std::log(-std::log(u)));
}

// argmax of score + noise. `noisy` comes from gumbel_row, good to 1e-4: what lies that near its top is done exactly.
int64_t draw(const float* score, const int32_t* id, int count, uint32_t key0, uint32_t key1, float* noisy) {
  const float approximate = isa().gumbel_row(score, id, count, key0, key1, noisy);
  if (!(approximate > -std::numeric_limits<float>::infinity())) return 0;
  const float close = approximate - (1e-3f + 1e-6f * std::fabs(approximate));
  int64_t best_id = 0;
  float best = -std::numeric_limits<float>::infinity();
  for (int i = 0; i < count; ++i) {
    if (noisy[i] < close) continue;
    const uint32_t token = static_cast<uint32_t>(id ? id[i] : i);
    const float value = score[i] + gumbel(token, key0, key1);
    if (value > best) {
      best = value;
      best_id = token;
    }
  }
  return best_id;
}

struct Filters {
  int top_k;
  float top_p, min_p, typical_p;
  bool any() const { return top_k > 0 || top_p < 1.0f || min_p > 0.0f || typical_p < 1.0f; }
};

// Applies the filters, in the contract's order, to a row of scores whose likeliest token is `best`.
void filter(Candidates& c, const float* scores, int vocab, float largest, const Filters& f, float* exps) {
  isa().exp_row(scores, largest, exps, vocab);
  c.count = 0;
  for (int v = 0; v < vocab; ++v) {
    if (scores[v] == -std::numeric_limits<float>::infinity()) continue;
    c.id[c.count] = v;
    c.score[c.count] = scores[v];
    c.weight[c.count++] = exps[v];
  }
  if (f.top_k > 0 && f.top_k < c.count) {
    key_by_score(c);
    keep_prefix(c, false, f.top_k);
  }
  if (f.min_p > 0.0f) keep_min_p(c, f.min_p);
  if (f.typical_p < 1.0f) keep_typical(c, largest, f.typical_p);
  if (f.top_p < 1.0f) {
    key_by_score(c);
    // One token always stays: a target above zero keeps the first.
    keep_prefix(c, true, std::max(f.top_p * total_weight(c), std::numeric_limits<double>::min()));
  }
}

void sample_row(const SampleTask& task, int row) {
  const float* logits = task.logits + row * task.stride;
  const int vocab = task.vocab;
  const int best = isa().argmax_row(logits, vocab);
  const float temperature = task.all_greedy ? 0.0f : task.temperature[row];
  if (temperature == 0.0f) {
    task.out[row] = best;
    return;
  }
  const size_t lane_bytes = round_up(static_cast<size_t>(vocab) * 4, 64);
  char* memory = static_cast<char*>(scratch(Scratch::kChunk, 6 * lane_bytes));
  float* scores = reinterpret_cast<float*>(memory);
  float* noisy = reinterpret_cast<float*>(memory + lane_bytes);
  isa().divide_row(logits, temperature, scores, vocab);
  const uint32_t key0 = static_cast<uint32_t>(task.keys[2 * row]), key1 = static_cast<uint32_t>(task.keys[2 * row + 1]);
  const Filters filters = {task.top_k[row], task.top_p[row], task.min_p[row], task.typical_p[row]};
  if (!filters.any()) {
    task.out[row] = draw(scores, nullptr, vocab, key0, key1, noisy);
    return;
  }
  Candidates c;
  c.id = reinterpret_cast<int32_t*>(memory + 2 * lane_bytes);
  c.score = reinterpret_cast<float*>(memory + 3 * lane_bytes);
  c.weight = reinterpret_cast<float*>(memory + 4 * lane_bytes);
  c.key = reinterpret_cast<uint32_t*>(memory + 5 * lane_bytes);
  filter(c, scores, vocab, scores[best], filters, noisy);
  task.out[row] = draw(c.score, c.id, c.count, key0, key1, noisy);
}

}  // namespace

void sample(const SampleTask& task, int num_rows) {
  parallel_for(num_rows, [&](int row) { sample_row(task, row); });
}
