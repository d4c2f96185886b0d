// Which experts of a mixture a row takes, and with which scores: ops/base/routing.py.
#pragma once
#include <algorithm>
#include <limits>

#include "kernels.h"
#include "simd.h"

namespace SWARM_ISA {

// What is no number counts as larger than all.
inline bool larger(float a, float b) { return a > b || (a != a && b == b); }

// x [count] -> work of each, in place.
template <typename Work>
SWARM_INLINE void each_vector(float* x, int64_t count, const Work& work) {
  for (int64_t i = 0; i < count; i += LANES) {
    const int64_t width = count - i < LANES ? count - i : LANES;
    float part[LANES] = {};  // padded: vectors of LANES whatever the count, so every element is rounded alike
    std::memcpy(part, x + i, sizeof(float) * width);
    store(part, work(load(part)));
    std::memcpy(x + i, part, sizeof(float) * width);
  }
}

// x [count] -> e^x / sum e^x, in place, summed in the order of the numbers.
inline void softmax(float* x, int64_t count) {
  float peak = x[0], total = 0.0f;
  for (int64_t i = 1; i < count; i++)
    if (larger(x[i], peak)) peak = x[i];
  each_vector(x, count, [&](V v) { return exp2(rounded((v - peak) * LOG2_E)); });
  for (int64_t i = 0; i < count; i++) total += x[i];
  for (int64_t i = 0; i < count; i++) x[i] /= total;
}

// Places of the `count` largest of values [size], largest first, of equals the first; `places` may be null. taken [size]
// becomes 1 at these places, else 0.
inline void find_best(const float* values, int64_t size, int64_t count, float* taken, int64_t* places) {
  std::fill(taken, taken + size, 0.0f);
  for (int64_t n = 0; n < count; n++) {
    int64_t best = -1;
    for (int64_t i = 0; i < size; i++)
      if (taken[i] == 0.0f && (best < 0 || larger(values[i], values[best]))) best = i;
    taken[best] = 1.0f;
    if (places) places[n] = best;
  }
}

// Minus infinity for the experts of groups that are not used; work [2 * experts]. A group is as good as the sum of its two
// best.
inline void keep_best_groups(const SwarmRouting& how, int64_t experts, float* choice, float* work) {
  const int64_t size = experts / how.groups;
  float *quality = work, *used = work + experts;
  for (int64_t g = 0; g < how.groups; g++) {
    int64_t two[2];
    find_best(choice + g * size, size, 2, used, two);
    quality[g] = choice[g * size + two[0]] + choice[g * size + two[1]];
  }
  find_best(quality, how.groups, how.used_groups, used, nullptr);
  for (int64_t g = 0; g < how.groups; g++)
    if (used[g] == 0.0f)
      std::fill(choice + g * size, choice + (g + 1) * size, -std::numeric_limits<float>::infinity());
}

// logits [experts], overwritten, and work [3 * experts] -> index and scores [chosen]. `correction` [experts] or null.
inline void route_row(const SwarmRouting& how, const float* correction, int64_t experts, float* logits, float* work,
                      int64_t* index, float* scores) {
  float *choice = work, *rest = work + experts;
  if (how.scores == SWARM_SOFTMAX) softmax(logits, experts);
  if (how.scores == SWARM_SIGMOID) each_vector(logits, experts, [](V v) { return sigmoid(v); });
  for (int64_t e = 0; e < experts; e++) choice[e] = correction ? logits[e] + correction[e] : logits[e];
  if (how.groups > 1) keep_best_groups(how, experts, choice, rest);
  find_best(choice, experts, how.chosen, rest, index);
  for (int64_t n = 0; n < how.chosen; n++) scores[n] = logits[index[n]];
  if (how.scores == SWARM_SOFTMAX_OF_CHOSEN) softmax(scores, how.chosen);
  if (how.normalized) {
    float total = 0.0f;
    for (int64_t n = 0; n < how.chosen; n++) total += scores[n];
    for (int64_t n = 0; n < how.chosen; n++) scores[n] /= total + how.epsilon;
  }
  for (int64_t n = 0; n < how.chosen; n++) scores[n] *= how.scale;
}

}  // namespace SWARM_ISA
