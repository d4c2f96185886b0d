// Query rows against panels of pages: four pages of keys, or 64 dimensions of a step's values. A panel stays in the
// first-level cache while all tiles of rows pass; where many do, it is widened to fp32 first.
#pragma once
#include "kernels.h"
#include "simd.h"
#include "softmax.h"

namespace SWARM_ISA {

using swarm::STEP_PAGES;

// Most rows of a register tile, where elements are widened on the way and where they are fp32 already, and the blocks
// (pages of keys, 16 dimensions of values) it spans. Few rows need many blocks to keep enough sums in flight; many rows
// save widening, many blocks save loads.
#if defined(__AVX512F__)
constexpr int NARROW_ROWS = 12, WIDE_ROWS = 6;
constexpr int blocks_wide(int rows) { return rows > 6 ? 2 : 4; }
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int NARROW_ROWS = 6, WIDE_ROWS = 6;
constexpr int blocks_wide(int rows) { return rows > 3 ? 1 : 2; }
#else
constexpr int NARROW_ROWS = 3, WIDE_ROWS = 3;
constexpr int blocks_wide(int) { return 1; }
#endif
constexpr int64_t PANEL_PAGES = 4, PANEL_DIMS = 64;
constexpr int64_t WIDEN_ABOVE = 2 * NARROW_ROWS;  // rows

inline bool widens(int64_t m, bool bf16) { return bf16 && m > WIDEN_ABOVE; }

// Rows of a tile when m rows share keys: as even as can be.
inline int64_t query_tile(int64_t m, bool bf16) {
  const int64_t most = bf16 && !widens(m, bf16) ? NARROW_ROWS : WIDE_ROWS, tiles = (m + most - 1) / most;
  return (m + tiles - 1) / tiles;
}

struct QueryTile {
  int64_t index, row, rows;  // its first query row
  Seen seen;                 // by any of its rows
};

// Pages of keys [dim][16], or of values [16][ld] from some dimension on.
template <typename T>
struct Panel {
  const T* page[STEP_PAGES] = {};
  const char* ahead[STEP_PAGES] = {};  // of the step's next, as stored
  int64_t ld;
  int64_t ahead_stride;  // bytes from a key's dimension, or a value, to the next as stored
  PageRange pages;
};

// The page to ask for while a tile uses page p: each tile has its own, and what is left is in use anyway.
template <typename T>
SWARM_INLINE const char* ahead_of(const Panel<T>& panel, int64_t p, int64_t tile, int64_t tiles) {
  return panel.ahead[p] && p % tiles == tile ? panel.ahead[p] : reinterpret_cast<const char*>(panel.page[p]);
}

// q [dim][ROWS] x the panel's keys -> scores [ROWS][STEP_KEYS].
template <int ROWS, typename T>
SWARM_APART void score(const float* q, int64_t dim, const Panel<T>& panel, int64_t tile, int64_t tiles,
                        float* scores) {
  constexpr int PAGES_WIDE = blocks_wide(ROWS), N = PAGES_WIDE * VECS;
  for (int64_t p = panel.pages.begin / PAGES_WIDE * PAGES_WIDE; p < panel.pages.end; p += PAGES_WIDE) {
    const T* keys[PAGES_WIDE];
    const char* ahead[PAGES_WIDE];
    SWARM_UNROLL
    for (int j = 0; j < PAGES_WIDE; j++) keys[j] = panel.page[p + j], ahead[j] = ahead_of(panel, p + j, tile, tiles);
    V acc[ROWS][N];
    SWARM_UNROLL
    for (int r = 0; r < ROWS; r++)
      SWARM_UNROLL
      for (int j = 0; j < N; j++) acc[r][j] = zero();
    const float* column = q;
    int64_t ahead_at = 0;
    for (int64_t d = 0; d < dim; d += 2, ahead_at += 2 * panel.ahead_stride) {
      SWARM_UNROLL
      for (int half = 0; half < 2; half++, column += ROWS) {
        V wide[N];
        SWARM_UNROLL
        for (int j = 0; j < N; j++) wide[j] = load(keys[j / VECS] + (d + half) * PAGE + (j % VECS) * LANES);
        SWARM_UNROLL
        for (int j = half; j < PAGES_WIDE; j += 2) __builtin_prefetch(ahead[j] + ahead_at);
        SWARM_UNROLL
        for (int r = 0; r < ROWS; r++)
          SWARM_UNROLL
          for (int j = 0; j < N; j++) acc[r][j] += column[r] * wide[j];
      }
    }
    SWARM_UNROLL
    for (int r = 0; r < ROWS; r++)
      SWARM_UNROLL
      for (int j = 0; j < N; j++) store(scores + r * STEP_KEYS + p * PAGE + j * LANES, acc[r][j]);
  }
}

// mix [ROWS][WIDTH of dim] = mix * shrink + weights [ROWS][STEP_KEYS] x values, from column d of the panel on, over the
// keys in `seen`.
template <int ROWS, int WIDTH, typename T>
SWARM_APART void gather(const float* weights, const float* shrink, const Panel<T>& panel, int64_t d,
                         const QueryTile& tile, int64_t tiles, int64_t dim, float* mix) {
  constexpr int N = WIDTH / LANES;
  V acc[ROWS][N];
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++)
    SWARM_UNROLL
    for (int j = 0; j < N; j++) acc[r][j] = load(mix + r * dim + j * LANES) * shrink[r];
  const auto add = [&](const T* value, const float* weight) __attribute__((always_inline)) {
    V wide[N];
    SWARM_UNROLL
    for (int j = 0; j < N; j++) wide[j] = load(value + j * LANES);
    SWARM_UNROLL
    for (int r = 0; r < ROWS; r++)
      SWARM_UNROLL
      for (int j = 0; j < N; j++) acc[r][j] += weight[r * STEP_KEYS] * wide[j];
  };
  for (int64_t p = panel.pages.begin; p < panel.pages.end; p++) {
    uint32_t bits = tile.seen.page(p);
    const T* value = panel.page[p] + d;
    const float* weight = weights + p * PAGE;
    if (bits == 0xffff) {
      const char* ahead = ahead_of(panel, p, tile.index, tiles) + d * panel.ahead_stride / dim;
      for (int t = 0; t < PAGE; t++, value += panel.ld, ahead += panel.ahead_stride) {
        __builtin_prefetch(ahead), __builtin_prefetch(ahead + 64);
        add(value, weight + t);
      }
    } else {
      for (; bits; bits &= bits - 1) {
        const int t = __builtin_ctz(bits);
        add(value + t * panel.ld, weight + t);
      }
    }
  }
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++)
    SWARM_UNROLL
    for (int j = 0; j < N; j++) store(mix + r * dim + j * LANES, acc[r][j]);
}

// The panel's columns [0, width) into mix [ROWS][dim].
template <int ROWS, typename T>
SWARM_INLINE void gather_panel(const float* weights, const float* shrink, const Panel<T>& panel, int64_t width,
                               const QueryTile& tile, int64_t tiles, int64_t dim, float* mix) {
  constexpr int WIDE_DIMS = blocks_wide(ROWS) * BLOCK;
  int64_t d = 0;
  for (; d + WIDE_DIMS <= width; d += WIDE_DIMS)
    gather<ROWS, WIDE_DIMS>(weights, shrink, panel, d, tile, tiles, dim, mix + d);
  for (; d < width; d += BLOCK) gather<ROWS, BLOCK>(weights, shrink, panel, d, tile, tiles, dim, mix + d);
}

// The panel in fp32, `rows` of `width` elements a page, at `to`.
inline Panel<float> widened(const Panel<uint16_t>& panel, int64_t rows, int64_t width, float* to) {
  Panel<float> wide;
  wide.pages = panel.pages, wide.ld = width, wide.ahead_stride = panel.ahead_stride;
  for (int64_t p = 0; p < STEP_PAGES; p++) {
    wide.page[p] = to, wide.ahead[p] = panel.ahead[p];
    if (p < panel.pages.begin || p >= panel.pages.end) continue;
    for (int64_t r = 0; r < rows; r++, to += width)
      for (int64_t e = 0; e < width; e += LANES) store(to + e, load(panel.page[p] + r * panel.ld + e));
  }
  return wide;
}

}  // namespace SWARM_ISA
