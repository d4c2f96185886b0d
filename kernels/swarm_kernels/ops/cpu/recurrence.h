// Layers that carry a state from row to row: short convolutions of each channel by itself, and linear recurrences of
// heads (gated delta rule, selective state spaces, linear attention with decay).
#pragma once
#include "gating.h"
#include "kernels.h"
#include "norm_rope.h"
#include "routing.h"
#include "simd.h"
#include "transpose.h"

namespace SWARM_ISA {

using swarm::RecurrenceJob;
using swarm::StateStep;

// Columns of a head's state that are computed together: of 128 keys they fit into the first-level cache.
constexpr int STATE_VECS = LANES == 16 ? 2 : 4, STATE_COLUMNS = STATE_VECS * LANES;

// taps [how.taps]: the inputs of a row and of those before it, the row's own last. -> y, channels [begin, end).
inline void convolve(const float* const* taps, const SwarmConvolution& how, int64_t begin, int64_t end, float* y) {
  for (int64_t c = begin; c < end; c += LANES) {
    const int64_t width = end - c < LANES ? end - c : LANES;
    const bool whole = width == LANES;
    const auto part = [&](const float* from) {
      if (whole) return load(from + c);
      float padded[LANES] = {};  // vectors of LANES whatever the width, so every element is rounded alike
      std::memcpy(padded, from + c, sizeof(float) * width);
      return load(padded);
    };
    V total = how.bias ? part(how.bias) : zero();
    for (int64_t t = 0; t < how.taps; t++) total += part(taps[t]) * part(how.weight + t * how.channels);
    if (how.rounds_to_bf16) total = rounded_to_bf16(total);
    if (how.silu) total = total * sigmoid(total);
    float result[LANES];
    store(result, total);
    std::memcpy(y + c, result, sizeof(float) * width);
  }
}

// What all columns of a row's heads need: query and key [key_heads][keys], decay [heads] or [heads][keys]; `keys` is
// key_dim rounded up, and what is added is zero.
inline void prepare_recurrence(const SwarmRecurrence& how, int64_t row, int64_t keys, float* query, float* key,
                               float* decay) {
  const int64_t dim = how.key_dim;
  for (int64_t h = 0; h < how.key_heads; h++) {
    const float *q = how.query + row * how.query_row + h * dim, *k = how.key + row * how.key_row + h * dim;
    float q_factor = 1.0f, k_factor = 1.0f;
    if (how.normalizes) {
      q_factor = 1.0f / std::sqrt(sum_of_squares(q, dim) + how.eps);
      k_factor = 1.0f / std::sqrt(sum_of_squares(k, dim) + how.eps);
    }
    for (int64_t i = 0; i < keys; i++) {
      query[h * keys + i] = i < dim ? q[i] * q_factor * how.scale : 0.0f;
      key[h * keys + i] = i < dim ? k[i] * k_factor : 0.0f;
    }
  }
  const int64_t width = how.decay_by_key ? dim : how.heads, step = how.decay_by_key ? keys : how.heads;
  for (int64_t h = 0; h < (how.decay_by_key ? how.heads : 1); h++, decay += step) {
    std::memcpy(decay, how.decay + (row * how.heads + h) * (how.decay_by_key ? dim : 1), sizeof(float) * width);
    each_vector(decay, width, [](V v) { return exp2(rounded(v * LOG2_E)); });
    if (width < step) std::fill(decay + width, decay + step, 0.0f);
  }
}

// Columns [column, column + width) of a head's state and their place in a slot, [keys][STATE_COLUMNS].
template <typename Work>
SWARM_INLINE void each_state_row(const SwarmRecurrence& how, int64_t head, int64_t column, const Work& work) {
  for (int64_t k = 0; k < how.key_dim; k++)
    work((head * how.key_dim + k) * how.value_dim + column, k * STATE_COLUMNS);
}

inline void load_state(const SwarmRecurrence& how, int64_t keys, int64_t head, int64_t column, int64_t width,
                       const float* state, float* slot) {
  if (!state || width < STATE_COLUMNS || keys > how.key_dim) std::fill(slot, slot + keys * STATE_COLUMNS, 0.0f);
  if (!state) return;
  if (!how.values_first)
    return each_state_row(how, head, column, [&](int64_t from, int64_t to) {
      std::memcpy(slot + to, state + from, sizeof(float) * width);
    });
  const float* first = state + (head * how.value_dim + column) * how.key_dim;
  const int64_t dim = how.key_dim, even = width % 4 == 0 ? dim / 4 * 4 : 0;
  for (int64_t c = 0; even && c < width; c += 4)
    for (int64_t k = 0; k < even; k += 4)
      transpose4(first + c * dim + k, dim, slot + k * STATE_COLUMNS + c, STATE_COLUMNS);
  for (int64_t c = 0; c < width; c++)
    for (int64_t k = even; k < dim; k++) slot[k * STATE_COLUMNS + c] = first[c * dim + k];
}

inline void save_state(const SwarmRecurrence& how, int64_t head, int64_t column, int64_t width, const float* slot,
                       float* state) {
  if (!how.values_first)
    return each_state_row(how, head, column, [&](int64_t to, int64_t from) {
      std::memcpy(state + to, slot + from, sizeof(float) * width);
    });
  float* first = state + (head * how.value_dim + column) * how.key_dim;
  const int64_t dim = how.key_dim, even = width % 4 == 0 ? dim / 4 * 4 : 0;
  for (int64_t c = 0; even && c < width; c += 4)
    for (int64_t k = 0; k < even; k += 4)
      transpose4(slot + k * STATE_COLUMNS + c, STATE_COLUMNS, first + c * dim + k, dim);
  for (int64_t c = 0; c < width; c++)
    for (int64_t k = even; k < dim; k++) first[c * dim + k] = slot[k * STATE_COLUMNS + c];
}

// One row: S = decay S + key (x) u, out = query S, where u = beta (value - key (decay S)) if it CORRECTS (the delta
// rule), else beta value. `from` may be `to`. Even and odd keys are summed apart, in a fixed order.
template <bool BY_KEY, bool CORRECTS>
SWARM_NOINLINE void advance(const float* from, float* to, int64_t keys, const float* query, const float* key,
                            const float* decay, float beta, const float* value, float* out) {
  V update[STATE_VECS], sums[2][STATE_VECS];
  for (int j = 0; j < STATE_VECS; j++) {
    update[j] = load(value + j * LANES);
    sums[0][j] = sums[1][j] = zero();
  }
  if constexpr (CORRECTS) {
    SWARM_NO_UNROLL
    for (int64_t k = 0; k < keys; k += 2) {
      SWARM_UNROLL
      for (int i = 0; i < 2; i++) {
        SWARM_UNROLL
        for (int j = 0; j < STATE_VECS; j++) {
          V kept = load(from + (k + i) * STATE_COLUMNS + j * LANES);
          if constexpr (BY_KEY) kept = rounded(kept * decay[k + i]);
          sums[i][j] += kept * key[k + i];
        }
      }
    }
    for (int j = 0; j < STATE_VECS; j++) {
      const V found = sums[0][j] + sums[1][j];
      update[j] -= rounded(BY_KEY ? found : found * decay[0]);
      sums[0][j] = sums[1][j] = zero();
    }
  }
  for (int j = 0; j < STATE_VECS; j++) update[j] *= beta;
  SWARM_NO_UNROLL
  for (int64_t k = 0; k < keys; k += 2) {
    SWARM_UNROLL
    for (int i = 0; i < 2; i++) {
      SWARM_UNROLL
      for (int j = 0; j < STATE_VECS; j++) {
        const int64_t at = (k + i) * STATE_COLUMNS + j * LANES;
        const V kept = load(from + at) * decay[BY_KEY ? k + i : 0];
        const V state = rounded(kept) + update[j] * key[k + i];
        store(to + at, state);
        sums[i][j] += state * query[k + i];
      }
    }
  }
  for (int j = 0; j < STATE_VECS; j++) store(out + j * LANES, sums[0][j] + sums[1][j]);
}

// All rows, columns [column, column + STATE_COLUMNS) of one head. slots: one of each state that is needed at a time.
template <bool BY_KEY, bool CORRECTS>
void recur_rows(const RecurrenceJob& job, int64_t head, int64_t column, float* slots) {
  const SwarmRecurrence& how = *job.how;
  const int64_t width = std::min<int64_t>(STATE_COLUMNS, how.value_dim - column), size = job.keys * STATE_COLUMNS;
  const int64_t key_head = head * how.key_heads / how.heads;
  for (int64_t i = 0; i < job.count; i++) {
    const StateStep& step = job.steps[i];
    float *from = slots + step.from * size, *to = slots + step.to * size;
    if (step.start >= 0) load_state(how, job.keys, head, column, width, job.starts[step.start], from);
    const int64_t of_head = step.row * how.heads + head, of_key = (step.row * how.key_heads + key_head) * job.keys;
    float value[STATE_COLUMNS] = {}, out[STATE_COLUMNS];
    std::memcpy(value, how.value + step.row * how.value_row + head * how.value_dim + column, sizeof(float) * width);
    advance<BY_KEY, CORRECTS>(from, to, job.keys, job.query + of_key, job.key + of_key,
                              job.decay + of_head * (BY_KEY ? job.keys : 1), how.beta ? how.beta[of_head] : 1.0f,
                              value, out);
    if (how.skip)
      for (int j = 0; j < STATE_VECS; j++)
        store(out + j * LANES, load(out + j * LANES) + load(value + j * LANES) * how.skip[head]);
    std::memcpy(how.out + of_head * how.value_dim + column, out, sizeof(float) * width);
    for (int32_t s = step.save_begin; s < step.save_end; s++)
      save_state(how, head, column, width, to, job.saved[job.saves[s]]);
  }
}

inline void recur(const RecurrenceJob& job, int64_t head, int64_t column, float* slots) {
  const bool by_key = job.how->decay_by_key, corrects = job.how->corrects;
  const auto rows = by_key ? (corrects ? recur_rows<true, true> : recur_rows<true, false>)
                           : (corrects ? recur_rows<false, true> : recur_rows<false, false>);
  rows(job, head, column, slots);
}

// A group of a row: x / rms(x) weight activation(gate), or, with gate_first, the same of x activation(gate).
inline void norm_gated(const SwarmGatedNorm& how, const float* x, const float* gate, const float* weight, float* y) {
  const auto activation = [&](V g) { return how.sigmoid ? sigmoid(g) : g * sigmoid(g); };
  const auto by_gate = [&](V value, V g) { return value * activation(g); };
  if (how.gate_first) by_vectors(x, gate, how.size, y, by_gate);
  const float factor = inverse_rms(how.gate_first ? y : x, how.size, how.eps);
  by_vectors(how.gate_first ? y : x, weight, how.size, y, [&](V value, V w) {
    value = rounded(value * factor);
    if (!how.rounds) return rounded(value * w);
    return rounded_to_bf16(rounded_to_bf16(value) * w);
  });
  if (!how.gate_first) by_vectors(y, gate, how.size, y, by_gate);
}

}  // namespace SWARM_ISA
