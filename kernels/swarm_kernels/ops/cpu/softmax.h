// Online softmax of tiles of rows (Milakov and Gimelshein, 2018): scores of a step of keys become weights, and earlier
// sums are rescaled to the new maximum. Scores are in units of log2. The maximum is rounded up to an integer, so that
// rescaling multiplies by powers of two and bf16 rounding of a weight does not depend on earlier keys.
#pragma once
#include "bf16.h"
#include "kernels.h"
#include "simd.h"

namespace SWARM_ISA {

using swarm::CHUNK;
using swarm::KV_BLOCK;
using swarm::SoftmaxState;
using swarm::STEP_KEYS;
using swarm::STEP_WORDS;

// Visible keys of a step, from its first KV block on.
struct KeyMask {
  uint64_t words[STEP_WORDS];

  SWARM_INLINE uint32_t kv_block(int64_t p) const {
    return (uint32_t)(words[p * KV_BLOCK / CHUNK] >> p * KV_BLOCK % CHUNK) & 0xffff;
  }
  SWARM_INLINE void operator|=(const KeyMask& other) {
    for (int w = 0; w < STEP_WORDS; w++) words[w] |= other.words[w];
  }
  SWARM_INLINE bool none() const {
    uint64_t any = 0;
    for (int w = 0; w < STEP_WORDS; w++) any |= words[w];
    return any == 0;
  }
};

// The KV blocks of a step with a visible key lie in [begin, end).
struct KvBlockRange {
  int64_t begin, end;
};

// How weights are stored: fp32, or the nearest bf16, as fp32 or packed in the first half of a row.
enum class WeightFormat { EXACT, ROUNDED, PACKED };
constexpr WeightFormat BF16_WEIGHT_FORMAT = BF16_INPUTS == 2 ? WeightFormat::PACKED : WeightFormat::ROUNDED;

// Lanes whose bit is clear become `hidden`.
SWARM_INLINE V select_lanes(V values, uint32_t bits, float hidden) {
  I lane;
  SWARM_UNROLL
  for (int i = 0; i < LANES; i++) lane[i] = 1 << i;
  return (lane & (int32_t)bits) != 0 ? values : splat(hidden);
}

// limit * tanh(score / limit), times log2(e).
SWARM_INLINE V apply_softcap(V scores, float limit) {
  V twice = scores * (2.0f * LOG2_E / limit);
  twice = twice > 126.0f ? splat(126.0f) : twice;
  return LOG2_E * (limit - (2.0f * limit) / (exp2(twice) + 1.0f));
}

// scores [ROWS][STEP_KEYS] -> row_max: the maximum of it and the visible scores, rounded up. WHOLE: all keys of these
// KV blocks are visible; else masked scores become -inf and the others are soft-capped.
template <int ROWS, bool WHOLE>
SWARM_INLINE void update_row_max(float* scores, const KeyMask* row_masks, KvBlockRange kv_blocks, float softcap,
                                 float* row_max) {
  V top[ROWS];
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++) top[r] = splat(row_max[r]);
  for (int64_t p = kv_blocks.begin; p < kv_blocks.end; p++) {
    SWARM_UNROLL
    for (int j = 0; j < VECS; j++) {
      SWARM_UNROLL
      for (int r = 0; r < ROWS; r++) {
        float* at = scores + r * STEP_KEYS + p * KV_BLOCK + j * LANES;
        V s = load(at);
        if constexpr (!WHOLE) {
          if (softcap != 0) s = apply_softcap(s, softcap);
          s = select_lanes(s, row_masks[r].kv_block(p) >> (j * LANES), -INFINITY);
          store(at, s);
        }
        top[r] = max(s, top[r]);
      }
    }
  }
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++) row_max[r] = std::ceil(largest(top[r]));
}

// Scores minus their row's maximum become weights; their sums go to `row_sums`.
template <int ROWS, bool WHOLE, WeightFormat KIND>
SWARM_INLINE void exponentiate(float* scores, const KeyMask* row_masks, KvBlockRange kv_blocks, const float* row_max,
                               float* row_sums) {
  V total[ROWS];
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++) total[r] = zero();
  for (int64_t p = kv_blocks.begin; p < kv_blocks.end; p++) {
    SWARM_UNROLL
    for (int j = 0; j < VECS; j++) {
      SWARM_UNROLL
      for (int r = 0; r < ROWS; r++) {
        float* at = scores + r * STEP_KEYS + p * KV_BLOCK + j * LANES;
        V weight = exp2(load(at) - row_max[r]);
        if constexpr (!WHOLE) weight = select_lanes(weight, row_masks[r].kv_block(p) >> (j * LANES), 0.0f);
        if constexpr (KIND == WeightFormat::EXACT) {
          store(at, weight);
        } else {
          const U nearest = nearest_bf16(weight) & 0xffff0000u;
          weight = (V)nearest;
          if constexpr (KIND == WeightFormat::ROUNDED)
            store(at, weight);
          else
            store_halves(reinterpret_cast<uint16_t*>(scores + r * STEP_KEYS) + p * KV_BLOCK + j * LANES, nearest);
        }
        total[r] += weight;
      }
    }
  }
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++) row_sums[r] = sum(total[r]);
}

// The factor that rescales sums from the maximum `before` to `now`; [LANES] each.
SWARM_INLINE V rescale_factor(V before, V now) {
  const V factor = before == -INFINITY ? zero() : exp2(before - now);
  return before == now ? splat(1.0f) : factor;
}

// Whether all keys of the KV blocks are visible to all rows.
SWARM_INLINE bool all_visible(const KeyMask* row_masks, int rows, KvBlockRange kv_blocks) {
  uint64_t missing = 0;
  for (int w = 0; w < STEP_WORDS; w++) {
    const int64_t from = kv_blocks.begin * KV_BLOCK - w * CHUNK, to = kv_blocks.end * KV_BLOCK - w * CHUNK;
    uint64_t wanted = to >= CHUNK ? ~0ull : to <= 0 ? 0 : (1ull << to) - 1;
    if (from > 0) wanted = from >= CHUNK ? 0 : wanted & (~0ull << from);
    for (int r = 0; r < rows; r++) missing |= wanted & ~row_masks[r].words[w];
  }
  return missing == 0;
}

// scores [ROWS][STEP_KEYS] of a tile whose first row is query row i -> weights in place, and the rescale factors.
// `row_masks`: of batch rows, each of which is `queries_per_kv` query rows.
template <int ROWS, WeightFormat KIND>
SWARM_NOINLINE void online_softmax(float* scores, const KeyMask* row_masks, int64_t queries_per_kv,
                                   KvBlockRange kv_blocks, float softcap, const SoftmaxState& state, int64_t i,
                                   float* rescale) {
  constexpr int PADDED = (ROWS + LANES - 1) / LANES * LANES;
  float before[PADDED] = {}, now[PADDED] = {}, total[ROWS], factor[PADDED];
  KeyMask masks[ROWS];
  int64_t row = i / queries_per_kv, left = queries_per_kv - i % queries_per_kv;
  for (int r = 0; r < ROWS; r++, left--) {
    if (left == 0) row++, left = queries_per_kv;
    masks[r] = row_masks[row];
    before[r] = now[r] = state.max[i + r];
  }
  if (softcap == 0 && all_visible(masks, ROWS, kv_blocks)) {
    update_row_max<ROWS, true>(scores, masks, kv_blocks, softcap, now);
    exponentiate<ROWS, true, KIND>(scores, masks, kv_blocks, now, total);
  } else {
    update_row_max<ROWS, false>(scores, masks, kv_blocks, softcap, now);
    exponentiate<ROWS, false, KIND>(scores, masks, kv_blocks, now, total);
  }
  SWARM_UNROLL
  for (int r = 0; r < PADDED; r += LANES) store(factor + r, rescale_factor(load(before + r), load(now + r)));
  for (int r = 0; r < ROWS; r++) {
    rescale[r] = factor[r];
    state.max[i + r] = now[r];
    state.sum[i + r] = state.sum[i + r] * factor[r] + total[r];
  }
}

// Adds the part's softmax to `into`: both are rescaled to the larger maximum (Ghidorah, section III-B).
inline void merge(int64_t m, int64_t dim, const SoftmaxState& into, const SoftmaxState& part) {
  for (int64_t i = 0; i < m; i += LANES) {
    const int64_t rows = m - i < LANES ? m - i : LANES;
    float before[LANES] = {}, other[LANES] = {}, old[LANES], add[LANES];
    std::memcpy(before, into.max + i, sizeof(float) * rows);
    std::memcpy(other, part.max + i, sizeof(float) * rows);
    const V peak = max(load(before), load(other));
    store(old, rescale_factor(load(before), peak));
    store(add, rescale_factor(load(other), peak));
    for (int64_t r = i; r < i + rows; r++) {
      if (part.max[r] == -INFINITY) continue;  // its weighted sum is zero
      into.max[r] = peak[r - i];
      into.sum[r] = into.sum[r] * old[r - i] + part.sum[r] * add[r - i];
      float *weighted = into.weighted + r * dim, *from = part.weighted + r * dim;
      for (int64_t d = 0; d < dim; d += LANES)
        store(weighted + d, load(weighted + d) * old[r - i] + load(from + d) * add[r - i]);
    }
  }
}

}  // namespace SWARM_ISA
