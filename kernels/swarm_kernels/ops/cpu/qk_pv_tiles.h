// Micro-kernels for QK^T and PV on panels: four KV blocks of keys, or 64 dimensions of a step's values. A panel stays
// in the L1 cache while all query tiles use it; if there are many, it is packed first. Sums are those of bf16.h, over
// pairs of dimensions and pairs of keys: queries and weights are rounded to bf16 where keys and values are, and of each
// pair the second product is added first.
#pragma once
#include <type_traits>

#include "bf16.h"
#include "kernels.h"
#include "simd.h"
#include "softmax.h"

namespace SWARM_ISA {

using swarm::STEP_KV_BLOCKS;

// Most rows of a register tile over unpacked and over packed panels, and the blocks (KV blocks of keys, 16 dimensions
// of values) it spans. Few rows need many blocks to keep enough sums in flight; many rows amortize the conversion, many
// blocks the loads.
#if defined(__AVX512F__)
constexpr int UNPACKED_ROWS = 12, PACKED_ROWS = 6;
constexpr int blocks_wide(int rows) { return rows > 6 ? 2 : 4; }
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int UNPACKED_ROWS = 6, PACKED_ROWS = 6;
constexpr int blocks_wide(int rows) { return rows > 3 ? 1 : 2; }
#else
constexpr int UNPACKED_ROWS = 3, PACKED_ROWS = 3;
constexpr int blocks_wide(int) { return 1; }
#endif
constexpr int64_t PANEL_KV_BLOCKS = 4, PANEL_DIMS = 64;
constexpr int64_t PACK_ABOVE_ROWS = 2 * UNPACKED_ROWS;  // rows

inline bool packs_panels(int64_t m, bool bf16) { return bf16 && m > PACK_ABOVE_ROWS; }

// Rows of a tile when m rows share keys: as even as can be.
inline int64_t query_tile(int64_t m, bool bf16) {
  const int64_t most = bf16 && !packs_panels(m, bf16) ? UNPACKED_ROWS : PACKED_ROWS, tiles = (m + most - 1) / most;
  return (m + tiles - 1) / tiles;
}

struct QueryTile {
  int64_t index, row, rows;  // its first query row
  KeyMask mask;                 // by any of its rows
};

// Elements are fp32, bf16 as stored, or packed bf16: Bf16Input, which is a pair in a word where there are dot-product
// instructions. Then a step of a sum takes a pair at once, otherwise one element of it after the other.
template <typename T>
constexpr bool PAIRED = BF16_INPUTS == 2 && !std::is_same_v<T, float>;
template <typename T>
constexpr int TERMS = PAIRED<T> ? 1 : 2;  // of a pair
template <typename T>
constexpr int STORED_LINES = std::is_same_v<T, uint32_t> ? 1 : 2;  // of a KV block that hold a pair
template <typename T>
using Factor = std::conditional_t<PAIRED<T>, uint32_t, float>;  // of queries and weights

// KV blocks of keys [dim][16], or of values [16][ld] from some dimension on.
template <typename T>
struct Panel {
  const T* kv_block[STEP_KV_BLOCKS] = {};
  const char* prefetch[STEP_KV_BLOCKS] = {};  // the next step's KV block, as stored
  int64_t ld;
  int64_t prefetch_stride;  // bytes from a key's dimension, or a value, to the next as stored
  KvBlockRange kv_blocks;
};

// The KV block to prefetch while a tile uses block p: tiles share the work; the others prefetch the block in use.
template <typename T>
SWARM_INLINE const char* prefetch_target(const Panel<T>& panel, int64_t p, int64_t tile, int64_t tiles) {
  return panel.prefetch[p] && p % tiles == tile ? panel.prefetch[p] : reinterpret_cast<const char*>(panel.kv_block[p]);
}

// Term I of LANES pairs whose first elements are at `at` and whose second ones `ld` further.
template <int I>
SWARM_INLINE V term(const float* at, int64_t ld) {
  return load(at + I * ld);
}
template <int I>
SWARM_INLINE V term(const uint16_t* at, int64_t ld) {
  if constexpr (BF16_INPUTS == 1) return load(at + I * ld);
  return (V)((U)load(at + ld) | (U)load(at) >> 16);
}
template <int I>
SWARM_INLINE V term(const uint32_t* at, int64_t) {
  return (V)load_words(at);
}
SWARM_INLINE V add_term(V sums, V elements, float factor) { return sums + factor * elements; }
#if defined(__AVX512BF16__)
SWARM_INLINE V add_term(V sums, V elements, uint32_t factor) { return add_products(sums, elements, factor); }
#endif

// The two bits of a pair (the lower: first element visible) as a mask of the pair in a word.
SWARM_INLINE uint32_t halves(uint32_t bits) { return (bits & 1 ? 0xffffu : 0) | (bits & 2 ? 0xffff0000u : 0); }

// q [dim / 2][TERMS][ROWS] x the panel's keys -> scores [ROWS][STEP_KEYS].
template <int ROWS, typename T>
SWARM_NOINLINE void compute_qk(const float* q, int64_t dim, const Panel<T>& panel, int64_t tile, int64_t tiles,
                        float* scores) {
  constexpr int KV_BLOCKS_WIDE = blocks_wide(ROWS), N = KV_BLOCKS_WIDE * VECS;
  int64_t p = panel.kv_blocks.begin / KV_BLOCKS_WIDE * KV_BLOCKS_WIDE;
  for (; p < panel.kv_blocks.end; p += KV_BLOCKS_WIDE) {
    const T* keys[KV_BLOCKS_WIDE];
    const char* prefetch[KV_BLOCKS_WIDE];
    SWARM_UNROLL
    for (int j = 0; j < KV_BLOCKS_WIDE; j++)
      keys[j] = panel.kv_block[p + j], prefetch[j] = prefetch_target(panel, p + j, tile, tiles);
    V acc[ROWS][N];
    SWARM_UNROLL
    for (int r = 0; r < ROWS; r++)
      SWARM_UNROLL
      for (int j = 0; j < N; j++) acc[r][j] = zero();
    const auto* factors = reinterpret_cast<const Factor<T>*>(q);
    const auto add = [&](auto index, int64_t pair) __attribute__((always_inline)) {
      V elements[N];
      SWARM_UNROLL
      for (int j = 0; j < N; j++)
        elements[j] =
            term<index.value>(keys[j / VECS] + pair * STORED_LINES<T> * KV_BLOCK + (j % VECS) * LANES, KV_BLOCK);
      SWARM_UNROLL
      for (int j = index.value; j < KV_BLOCKS_WIDE; j += TERMS<T>)
        __builtin_prefetch(prefetch[j] + pair * 2 * panel.prefetch_stride);
      SWARM_UNROLL
      for (int r = 0; r < ROWS; r++)
        SWARM_UNROLL
        for (int j = 0; j < N; j++) acc[r][j] = add_term(acc[r][j], elements[j], factors[index.value * ROWS + r]);
    };
    for (int64_t pair = 0; pair < dim / 2; pair++, factors += TERMS<T> * ROWS) {
      if constexpr (TERMS<T> == 2) add(std::integral_constant<int, 1>(), pair);
      add(std::integral_constant<int, 0>(), pair);
    }
    SWARM_UNROLL
    for (int r = 0; r < ROWS; r++)
      SWARM_UNROLL
      for (int j = 0; j < N; j++) store(scores + r * STEP_KEYS + p * KV_BLOCK + j * LANES, acc[r][j]);
  }
}

// weighted [ROWS][WIDTH of dim] = weighted * rescale + weights [ROWS][STEP_KEYS] x values, from column d of the panel
// on, over the keys in the tile's mask.
template <int ROWS, int WIDTH, typename T>
SWARM_NOINLINE void accumulate_pv(const Factor<T>* weights, const float* rescale, const Panel<T>& panel, int64_t d,
                         const QueryTile& tile, int64_t tiles, int64_t dim, float* weighted) {
  constexpr int N = WIDTH / LANES;
  V acc[ROWS][N];
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++)
    SWARM_UNROLL
    for (int j = 0; j < N; j++) acc[r][j] = load(weighted + r * dim + j * LANES) * rescale[r];
  const auto add = [&](auto index, const T* value, const Factor<T>* weight, uint32_t keep)
                       __attribute__((always_inline)) {
    V elements[N];
    SWARM_UNROLL
    for (int j = 0; j < N; j++) {
      elements[j] = term<index.value>(value + j * LANES, panel.ld);
      if constexpr (PAIRED<T>) elements[j] = (V)((U)elements[j] & keep);
    }
    SWARM_UNROLL
    for (int r = 0; r < ROWS; r++)
      SWARM_UNROLL
      for (int j = 0; j < N; j++) acc[r][j] = add_term(acc[r][j], elements[j], weight[r * STEP_KEYS + index.value]);
  };
  const auto add_pair = [&](const T* value, const Factor<T>* weight, uint32_t bits) __attribute__((always_inline)) {
    if constexpr (TERMS<T> == 2) {
      if (bits & 2) add(std::integral_constant<int, 1>(), value, weight, 0);
      if (bits & 1) add(std::integral_constant<int, 0>(), value, weight, 0);
    } else {
      add(std::integral_constant<int, 0>(), value, weight, halves(bits));
    }
  };
  for (int64_t p = panel.kv_blocks.begin; p < panel.kv_blocks.end; p++) {
    uint32_t bits = tile.mask.kv_block(p);
    const T* value = panel.kv_block[p] + d;
    const Factor<T>* weight = weights + p * KV_BLOCK / 2 * TERMS<T>;
    const int64_t step = STORED_LINES<T> * panel.ld;
    if (bits == 0xffff) {
      const char* prefetch = prefetch_target(panel, p, tile.index, tiles) + d * panel.prefetch_stride / dim;
      for (int pair = 0; pair < KV_BLOCK / 2; pair++, value += step, weight += TERMS<T>) {
        SWARM_UNROLL
        for (int line = 0; line < 2; line++, prefetch += panel.prefetch_stride)
          __builtin_prefetch(prefetch), __builtin_prefetch(prefetch + 64);
        add_pair(value, weight, 3);
      }
    } else {
      for (; bits; bits >>= 2, value += step, weight += TERMS<T>)
        if (bits & 3) add_pair(value, weight, bits & 3);
    }
  }
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++)
    SWARM_UNROLL
    for (int j = 0; j < N; j++) store(weighted + r * dim + j * LANES, acc[r][j]);
}

// The panel's columns [0, width) into weighted [ROWS][dim].
template <int ROWS, typename T>
SWARM_INLINE void accumulate_pv_panel(const float* weights, const float* rescale, const Panel<T>& panel, int64_t width,
                               const QueryTile& tile, int64_t tiles, int64_t dim, float* weighted) {
  constexpr int DIMS_WIDE = blocks_wide(ROWS) * BLOCK;
  const auto* factors = reinterpret_cast<const Factor<T>*>(weights);
  int64_t d = 0;
  for (; d + DIMS_WIDE <= width; d += DIMS_WIDE)
    accumulate_pv<ROWS, DIMS_WIDE>(factors, rescale, panel, d, tile, tiles, dim, weighted + d);
  for (; d < width; d += BLOCK) accumulate_pv<ROWS, BLOCK>(factors, rescale, panel, d, tile, tiles, dim, weighted + d);
}

// Packs the panel for the micro-kernels, `lines` of `width` elements per KV block, at `to`.
inline Panel<Bf16Input> pack_panel(const Panel<uint16_t>& panel, int64_t lines, int64_t width, float* to) {
  constexpr int A_LINE = BF16_INPUTS;
  Panel<Bf16Input> ready;
  ready.kv_blocks = panel.kv_blocks, ready.ld = width, ready.prefetch_stride = panel.prefetch_stride;
  for (int64_t p = 0; p < STEP_KV_BLOCKS; p++) {
    ready.kv_block[p] = reinterpret_cast<const Bf16Input*>(to), ready.prefetch[p] = panel.prefetch[p];
    if (p < panel.kv_blocks.begin || p >= panel.kv_blocks.end) continue;
    for (int64_t line = 0; line < lines; line += A_LINE, to += width)
      for (int64_t e = 0; e < width; e += LANES)
        store(to + e, term<0>(panel.kv_block[p] + line * panel.ld + e, panel.ld));
  }
  return ready;
}

}  // namespace SWARM_ISA
