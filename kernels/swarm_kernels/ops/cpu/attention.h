// Attention of query rows over paged keys and values by online softmax, in steps of 128 keys. It is batch-invariant: a
// row's arithmetic does not depend on the rows of its tile. Steps come in order, sums run over dimensions and then keys
// in ascending order, and masked keys have a weight of exactly zero.
#pragma once
#include <type_traits>

#include "kernels.h"
#include "latent_values.h"
#include "qk_pv_tiles.h"
#include "simd.h"
#include "softmax.h"

namespace SWARM_ISA {

using swarm::AttendJob;

// The memory that one step reads and what it prefetches: KV blocks of the next step are scattered, and the hardware
// prefetcher stops at the end of each.
template <typename T>
struct Step {
  const T *k[STEP_KV_BLOCKS], *v[STEP_KV_BLOCKS];
  const T *k_next[STEP_KV_BLOCKS], *v_next[STEP_KV_BLOCKS];
  KvBlockRange kv_blocks;  // with a key visible to some row
  bool last;        // no next step to prefetch
  int64_t tiles;    // they share the prefetching
  QueryTile* tile;  // [tiles]
  KeyMask* row_masks;       // batch rows
};

// The scratch memory of a job: a packed panel, scores [m, STEP_KEYS], and a few words per row.
struct Workspace {
  float *panel, *scores, *rescale;
  QueryTile* tile;  // at most m
  KeyMask* row_masks;       // at most m batch rows

  Workspace(const AttendJob& job) {
    panel = job.workspace;
    scores = panel + STEP_KEYS * panel_dims(job.dim);
    rescale = scores + job.m * STEP_KEYS;
    tile = reinterpret_cast<QueryTile*>(rescale + padded(job.m));
    row_masks = reinterpret_cast<KeyMask*>(tile + job.m);
  }
  static int64_t panel_dims(int64_t dim) { return dim > PANEL_DIMS ? dim : PANEL_DIMS; }
  static int64_t padded(int64_t m) { return (m + BLOCK - 1) / BLOCK * BLOCK; }
};

// Its size in floats.
inline int64_t attend_workspace(int64_t m, int64_t dim) {
  const int64_t a_row = (sizeof(QueryTile) + sizeof(KeyMask)) / sizeof(float);
  return STEP_KEYS * Workspace::panel_dims(dim) + m * (STEP_KEYS + a_row) + Workspace::padded(m);
}

// Calls work(std::integral_constant<int, rows>) for a number of rows up to ROWS known only at run time.
template <int ROWS, typename Work>
SWARM_INLINE void with_rows(int64_t rows, const Work& work) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return with_rows<ROWS - 1>(rows, work);
  }
  work(std::integral_constant<int, ROWS>());
}

template <typename T>
Panel<T> keys_of(const Step<T>& step, int64_t begin) {
  Panel<T> panel;
  panel.kv_blocks.begin = begin > step.kv_blocks.begin ? begin : step.kv_blocks.begin;
  panel.kv_blocks.end = begin + PANEL_KV_BLOCKS < step.kv_blocks.end ? begin + PANEL_KV_BLOCKS : step.kv_blocks.end;
  panel.ld = KV_BLOCK, panel.prefetch_stride = KV_BLOCK * sizeof(T);
  for (int64_t p = begin; p < begin + PANEL_KV_BLOCKS; p++) {
    panel.kv_block[p] = step.k[p];
    panel.prefetch[p] = reinterpret_cast<const char*>(step.last ? step.v[p] : step.k_next[p]);
  }
  return panel;
}

template <typename T>
Panel<T> values_of(const Step<T>& step, int64_t d, int64_t dim) {
  Panel<T> panel;
  panel.kv_blocks = step.kv_blocks;
  panel.ld = dim, panel.prefetch_stride = dim * sizeof(T);
  for (int64_t p = 0; p < STEP_KV_BLOCKS; p++) {
    panel.kv_block[p] = step.v[p] + d;
    panel.prefetch[p] = step.last ? nullptr : reinterpret_cast<const char*>(step.v_next[p] + d);
  }
  return panel;
}

template <typename T, int ROWS, bool PACK>
void attend_step(const AttendJob& job, const Step<T>& step, const Workspace& work, const SoftmaxState& state) {
  const auto each_tile = [&](const auto& use) {
    for (int64_t t = 0; t < step.tiles; t++) {
      const QueryTile& tile = step.tile[t];
      if (tile.mask.none()) continue;
      with_rows<ROWS>(tile.rows, [&](auto rows) {
        use(rows, tile, work.scores + tile.row * STEP_KEYS);
      });
    }
  };
  const auto use_keys = [&](const auto& panel) {
    each_tile([&](auto rows, const QueryTile& tile, float* scores) {
      compute_qk<rows.value>(job.q + tile.row * job.dim, job.dim, panel, tile.index, step.tiles, scores);
    });
  };
  const auto use_values = [&](const auto& panel, int64_t d, int64_t width) {
    each_tile([&](auto rows, const QueryTile& tile, float* weights) {
      accumulate_pv_panel<rows.value>(weights, work.rescale + tile.row, panel, width, tile, step.tiles, job.value_dim,
                               state.weighted + tile.row * job.value_dim + d);
    });
  };
  int64_t p = step.kv_blocks.begin / PANEL_KV_BLOCKS * PANEL_KV_BLOCKS;
  for (; p < step.kv_blocks.end; p += PANEL_KV_BLOCKS) {
    const Panel<T> keys = keys_of(step, p);
    if constexpr (PACK)
      use_keys(pack_panel(keys, job.dim, KV_BLOCK, work.panel));
    else
      use_keys(keys);
  }
  each_tile([&](auto rows, const QueryTile& tile, float* scores) {
    constexpr WeightFormat KIND = std::is_same_v<T, float> ? WeightFormat::EXACT : BF16_WEIGHT_FORMAT;
    online_softmax<rows.value, KIND>(scores, step.row_masks, job.queries_per_kv, step.kv_blocks, job.softcap, state,
                                     tile.row, work.rescale + tile.row);
  });
  for (int64_t d = 0; d < job.value_dim; d += PANEL_DIMS) {
    const int64_t width = job.value_dim - d < PANEL_DIMS ? job.value_dim - d : PANEL_DIMS;
    if (job.k == job.v) {
      use_values(pack_latent_values(step.k, step.kv_blocks, d, width, work.panel), d, width);
      continue;
    }
    const Panel<T> values = values_of(step, d, job.value_dim);
    if constexpr (PACK)
      use_values(pack_panel(values, KV_BLOCK, width, work.panel), d, width);
    else
      use_values(values, d, width);
  }
}

// The keys of a step visible to batch row `row`; the step begins with mask word `word`.
SWARM_INLINE KeyMask visible(const AttendJob& job, int64_t row, int64_t word) {
  KeyMask mask;
  for (int w = 0; w < STEP_WORDS; w++, word++) {
    if (job.mask) {
      mask.words[w] = word < job.mask_words ? job.mask[row * job.mask_words + word] : 0;
      continue;
    }
    const int64_t from = job.first_key[row] - word * CHUNK, to = job.end_key[row] - word * CHUNK;
    const uint64_t below = to >= CHUNK ? ~0ull : to <= 0 ? 0 : (1ull << to) - 1;
    mask.words[w] = from >= CHUNK ? 0 : from <= 0 ? below : below & (~0ull << from);
    if (job.chosen) mask.words[w] &= word < job.chosen_words ? job.chosen[row * job.chosen_words + word] : 0;
  }
  return mask;
}

// Start of KV block `at` of the sequence; beyond the end of its block table (only prefetched or masked), its last
// block.
template <typename T>
SWARM_INLINE const T* kv_block_at(const AttendJob& job, const void* head, int64_t at) {
  const int64_t kv_block = job.block_table[at < job.block_table_len ? at : job.block_table_len - 1];
  return static_cast<const T*>(head) + kv_block * job.kv_block_stride;
}

// Fills in the step that begins with mask word `word`; false if no row sees any of its keys.
template <typename T>
bool prepare_step(const AttendJob& job, int64_t word, Step<T>& step) {
  KeyMask mask{};
  for (int64_t row = 0; row * job.queries_per_kv < job.m; row++) mask |= step.row_masks[row] = visible(job, row, word);
  if (mask.none()) return false;
  step.tiles = 0;
  for (int64_t i = 0; i < job.m; i += job.tile_rows) {
    const int64_t rows = job.m - i < job.tile_rows ? job.m - i : job.tile_rows;
    QueryTile& tile = step.tile[step.tiles] = {step.tiles, i, rows, {}};
    for (int64_t row = i / job.queries_per_kv; row * job.queries_per_kv < i + rows; row++)
      tile.mask |= step.row_masks[row];
    step.tiles++;
  }
  step.kv_blocks = {STEP_KV_BLOCKS, 0};
  for (int64_t p = 0; p < STEP_KV_BLOCKS; p++) {
    const int64_t at = word * (CHUNK / KV_BLOCK) + p;
    step.k[p] = kv_block_at<T>(job, job.k, at), step.v[p] = kv_block_at<T>(job, job.v, at);
    step.k_next[p] = kv_block_at<T>(job, job.k, at + STEP_KV_BLOCKS);
    step.v_next[p] = kv_block_at<T>(job, job.v, at + STEP_KV_BLOCKS);
    if (mask.kv_block(p) == 0) continue;
    if (step.kv_blocks.begin > p) step.kv_blocks.begin = p;
    step.kv_blocks.end = p + 1;
  }
  return true;
}

template <typename T, int ROWS, bool PACK>
void attend_of(const AttendJob& job, int64_t begin, int64_t end, const SoftmaxState& state) {
  const Workspace work(job);
  Step<T> step;
  step.tile = work.tile, step.row_masks = work.row_masks;
  for (int64_t word = begin; word < end; word += STEP_WORDS) {
    step.last = word + STEP_WORDS >= job.prefetch_end;
    if (prepare_step(job, word, step)) attend_step<T, ROWS, PACK>(job, step, work, state);
  }
}

// Runs the softmax of all rows over words [begin, end) of 64 keys, from an empty state. `begin` is even.
inline void attend(const AttendJob& job, int64_t begin, int64_t end, const SoftmaxState& state) {
  for (int64_t i = 0; i < job.m; i++) state.max[i] = -INFINITY, state.sum[i] = 0.0f;
  std::memset(state.weighted, 0, sizeof(float) * job.m * job.value_dim);
  if (!job.bf16)
    attend_of<float, PACKED_ROWS, false>(job, begin, end, state);
  else if (packs_panels(job.m, true))
    attend_of<uint16_t, PACKED_ROWS, true>(job, begin, end, state);
  else
    attend_of<uint16_t, UNPACKED_ROWS, false>(job, begin, end, state);
}

}  // namespace SWARM_ISA
