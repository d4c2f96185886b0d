// Attention of query rows against paged keys and values, a step of 128 keys at a time, by online softmax. A row's
// arithmetic is the same whichever rows share its tile: steps come in order, sums run over dimensions, then over keys,
// in rising order, and keys a row does not see weigh exactly nothing.
#pragma once
#include <type_traits>

#include "kernels.h"
#include "qk_pv_tiles.h"
#include "simd.h"
#include "softmax.h"

namespace SWARM_ISA {

using swarm::AttendJob;

// What is read of memory in one step, and what is asked of it meanwhile: pages of the next step lie apart, and the
// hardware's own prefetch stops at the end of each.
template <typename T>
struct Step {
  const T *k[STEP_PAGES], *v[STEP_PAGES];
  const T *k_ahead[STEP_PAGES], *v_ahead[STEP_PAGES];
  PageRange pages;  // that some row sees
  bool last;        // nothing is ahead
  int64_t tiles;    // they share the asking
  QueryTile* tile;  // [tiles]
  Seen* sees;       // batch rows
};

// What a job works in: a prepared panel, scores [m, STEP_KEYS], and a few words a row.
struct Workspace {
  float *panel, *scores, *shrink;
  QueryTile* tile;  // at most m
  Seen* sees;       // at most m batch rows

  Workspace(const AttendJob& job) {
    panel = job.workspace;
    scores = panel + STEP_KEYS * wide_dims(job.dim);
    shrink = scores + job.m * STEP_KEYS;
    tile = reinterpret_cast<QueryTile*>(shrink + padded(job.m));
    sees = reinterpret_cast<Seen*>(tile + job.m);
  }
  static int64_t wide_dims(int64_t dim) { return dim > PANEL_DIMS ? dim : PANEL_DIMS; }
  static int64_t padded(int64_t m) { return (m + BLOCK - 1) / BLOCK * BLOCK; }
};

// Floats of it.
inline int64_t attend_workspace(int64_t m, int64_t dim) {
  const int64_t a_row = (sizeof(QueryTile) + sizeof(Seen)) / sizeof(float);
  return STEP_KEYS * Workspace::wide_dims(dim) + m * (STEP_KEYS + a_row) + Workspace::padded(m);
}

// work(std::integral_constant<int, rows>), for a number of rows up to ROWS known at run time.
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
  panel.pages.begin = begin > step.pages.begin ? begin : step.pages.begin;
  panel.pages.end = begin + PANEL_PAGES < step.pages.end ? begin + PANEL_PAGES : step.pages.end;
  panel.ld = PAGE, panel.ahead_stride = PAGE * sizeof(T);
  for (int64_t p = begin; p < begin + PANEL_PAGES; p++) {
    panel.page[p] = step.k[p];
    panel.ahead[p] = reinterpret_cast<const char*>(step.last ? step.v[p] : step.k_ahead[p]);
  }
  return panel;
}

template <typename T>
Panel<T> values_of(const Step<T>& step, int64_t d, int64_t dim) {
  Panel<T> panel;
  panel.pages = step.pages;
  panel.ld = dim, panel.ahead_stride = dim * sizeof(T);
  for (int64_t p = 0; p < STEP_PAGES; p++) {
    panel.page[p] = step.v[p] + d;
    panel.ahead[p] = step.last ? nullptr : reinterpret_cast<const char*>(step.v_ahead[p] + d);
  }
  return panel;
}

template <typename T, int ROWS, bool PREPARE>
void attend_step(const AttendJob& job, const Step<T>& step, const Workspace& work, const SoftmaxState& state) {
  const auto each_tile = [&](const auto& use) {
    for (int64_t t = 0; t < step.tiles; t++) {
      const QueryTile& tile = step.tile[t];
      if (tile.seen.none()) continue;
      with_rows<ROWS>(tile.rows, [&](auto rows) {
        use(rows, tile, work.scores + tile.row * STEP_KEYS);
      });
    }
  };
  const auto use_keys = [&](const auto& panel) {
    each_tile([&](auto rows, const QueryTile& tile, float* scores) {
      score<rows.value>(job.q + tile.row * job.dim, job.dim, panel, tile.index, step.tiles, scores);
    });
  };
  const auto use_values = [&](const auto& panel, int64_t d, int64_t width) {
    each_tile([&](auto rows, const QueryTile& tile, float* weights) {
      gather_panel<rows.value>(weights, work.shrink + tile.row, panel, width, tile, step.tiles, job.dim,
                               state.mix + tile.row * job.dim + d);
    });
  };
  for (int64_t p = step.pages.begin / PANEL_PAGES * PANEL_PAGES; p < step.pages.end; p += PANEL_PAGES) {
    const Panel<T> keys = keys_of(step, p);
    if constexpr (PREPARE)
      use_keys(prepared(keys, job.dim, PAGE, work.panel));
    else
      use_keys(keys);
  }
  each_tile([&](auto rows, const QueryTile& tile, float* scores) {
    constexpr Weights KIND = std::is_same_v<T, float> ? Weights::EXACT : BF16_WEIGHTS;
    soften<rows.value, KIND>(scores, step.sees, job.share, step.pages, job.softcap, state, tile.row,
                             work.shrink + tile.row);
  });
  for (int64_t d = 0; d < job.dim; d += PANEL_DIMS) {
    const int64_t width = job.dim - d < PANEL_DIMS ? job.dim - d : PANEL_DIMS;
    const Panel<T> values = values_of(step, d, job.dim);
    if constexpr (PREPARE)
      use_values(prepared(values, PAGE, width, work.panel), d, width);
    else
      use_values(values, d, width);
  }
}

// Which of a step's keys batch row `row` sees; the step begins with word `word`.
SWARM_INLINE Seen visible(const AttendJob& job, int64_t row, int64_t word) {
  Seen seen;
  for (int w = 0; w < STEP_WORDS; w++, word++) {
    if (job.mask) {
      seen.words[w] = word < job.words ? job.mask[row * job.words + word] : 0;
      continue;
    }
    const int64_t from = job.first[row] - word * CHUNK, to = job.past[row] - word * CHUNK;
    const uint64_t below = to >= CHUNK ? ~0ull : to <= 0 ? 0 : (1ull << to) - 1;
    seen.words[w] = from >= CHUNK ? 0 : from <= 0 ? below : below & (~0ull << from);
  }
  return seen;
}

// Where page `at` of the session begins; past the end of its table, where nobody looks: its last.
template <typename T>
SWARM_INLINE const T* page_of(const AttendJob& job, const void* head, int64_t at) {
  const int64_t page = job.table[at < job.table_pages ? at : job.table_pages - 1];
  return static_cast<const T*>(head) + page * job.page_stride;
}

// Who sees what of the step that begins with word `word`; false if nobody sees anything.
template <typename T>
bool look(const AttendJob& job, int64_t word, Step<T>& step) {
  Seen seen{};
  for (int64_t row = 0; row * job.share < job.m; row++) seen |= step.sees[row] = visible(job, row, word);
  if (seen.none()) return false;
  step.tiles = 0;
  for (int64_t i = 0; i < job.m; i += job.tile_rows) {
    const int64_t rows = job.m - i < job.tile_rows ? job.m - i : job.tile_rows;
    QueryTile& tile = step.tile[step.tiles] = {step.tiles, i, rows, {}};
    for (int64_t row = i / job.share; row * job.share < i + rows; row++) tile.seen |= step.sees[row];
    step.tiles++;
  }
  step.pages = {STEP_PAGES, 0};
  for (int64_t p = 0; p < STEP_PAGES; p++) {
    const int64_t at = word * (CHUNK / PAGE) + p;
    step.k[p] = page_of<T>(job, job.k, at), step.v[p] = page_of<T>(job, job.v, at);
    step.k_ahead[p] = page_of<T>(job, job.k, at + STEP_PAGES);
    step.v_ahead[p] = page_of<T>(job, job.v, at + STEP_PAGES);
    if (seen.page(p) == 0) continue;
    if (step.pages.begin > p) step.pages.begin = p;
    step.pages.end = p + 1;
  }
  return true;
}

template <typename T, int ROWS, bool PREPARE>
void attend_of(const AttendJob& job, int64_t begin, int64_t end, const SoftmaxState& state) {
  const Workspace work(job);
  Step<T> step;
  step.tile = work.tile, step.sees = work.sees;
  for (int64_t word = begin; word < end; word += STEP_WORDS) {
    step.last = word + STEP_WORDS >= job.ahead_end;
    if (look(job, word, step)) attend_step<T, ROWS, PREPARE>(job, step, work, state);
  }
}

// Runs the softmax of all rows over words [begin, end) of 64 keys, from an empty state. `begin` is even.
inline void attend(const AttendJob& job, int64_t begin, int64_t end, const SoftmaxState& state) {
  for (int64_t i = 0; i < job.m; i++) state.max[i] = -INFINITY, state.sum[i] = 0.0f;
  std::memset(state.mix, 0, sizeof(float) * job.m * job.dim);
  if (!job.bf16)
    attend_of<float, WIDE_ROWS, false>(job, begin, end, state);
  else if (prepares(job.m, true))
    attend_of<uint16_t, WIDE_ROWS, true>(job, begin, end, state);
  else
    attend_of<uint16_t, NARROW_ROWS, false>(job, begin, end, state);
}

}  // namespace SWARM_ISA
