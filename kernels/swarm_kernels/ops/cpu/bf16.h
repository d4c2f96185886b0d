// Micro-kernel for bf16 weights. Inputs are rounded to bf16 too, so products are exact in fp32; sums are rounded
// product by product, of each pair of inputs the second first, as the dot-product instructions do. Hence results are
// batch-invariant and bit for bit the same on every instruction set (those instructions flush numbers below 1e-38 to
// 0).
#pragma once
#include "kernels.h"
#include "simd.h"

namespace SWARM_ISA {

// An element of a tile: with dot-product instructions a pair of inputs, the first in the lower half, otherwise one
// input in fp32.
#if defined(__AVX512BF16__)
typedef uint32_t Bf16Input;
constexpr int64_t BF16_INPUTS = 2;
#else
typedef float Bf16Input;
constexpr int64_t BF16_INPUTS = 1;
#endif

// x [width] -> elements of a tile, at `to`, which may be x.
inline void round_inputs(const float* x, int64_t width, float* to) {
  char* at = reinterpret_cast<char*>(to);
  const auto put = [&](const void* value, int64_t size) { std::memcpy(at, value, size), at += size; };
  int64_t k = 0;
  for (; k + LANES <= width; k += LANES) {
    if constexpr (BF16_INPUTS == 2) {
      uint16_t halves[LANES];
      store_halves(halves, nearest_bf16(load(x + k)));
      put(halves, sizeof halves);
    } else {
      const V whole = rounded_to_bf16(load(x + k));
      put(&whole, sizeof whole);
    }
  }
  for (; k < width; k++) {
    const uint16_t half = to_bf16(x[k]);
    const uint32_t whole = (uint32_t)half << 16;
    if constexpr (BF16_INPUTS == 2)
      put(&half, sizeof half);
    else
      put(&whole, sizeof whole);
  }
}

// The weights that multiply element `I` of a pair's, from a pair of each of LANES outputs; and the sums with them.
template <int I>
SWARM_INLINE V weights_of(U pairs) {
  return BF16_INPUTS == 2 ? (V)pairs : I == 1 ? high_half(pairs) : low_half(pairs);
}
SWARM_INLINE V add_products(V sums, V weights, Bf16Input x) {
#if defined(__AVX512BF16__)
  return (V)_mm512_dpbf16_ps((__m512)sums, (__m512bh)(U{} + x), (__m512bh)weights);
#else
  return sums + x * weights;
#endif
}

// acc [ROWS][N] with element I of the pairs at x.
template <int I, int ROWS, int N>
SWARM_INLINE void add_elements(V (&acc)[ROWS][N], const Bf16Input* x, int64_t tile_rows, const uint16_t* w,
                               int64_t stride) {
  V weights[N];
  SWARM_UNROLL
  for (int j = 0; j < N; j++) weights[j] = weights_of<I>(load_words(w + (j / VECS) * stride + (j % VECS) * 2 * LANES));
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++)
    SWARM_UNROLL
    for (int j = 0; j < N; j++) acc[r][j] = add_products(acc[r][j], weights[j], x[I * tile_rows + r]);
}

// [ROWS] of a tile x [BLOCKS] weight blocks, `stride` elements apart -> c [ROWS][BLOCKS * 16]. `in`: even.
template <int ROWS, int BLOCKS>
void micro_kernel(const Bf16Input* x, int64_t tile_rows, int64_t in, const uint16_t* w, int64_t stride, float* c) {
  constexpr int N = BLOCKS * VECS;
  V acc[ROWS][N];
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++)
    SWARM_UNROLL
    for (int j = 0; j < N; j++) acc[r][j] = zero();
  for (int64_t k = 0; k < in; k += 2, w += 2 * BLOCK, x += 2 / BF16_INPUTS * tile_rows) {
    SWARM_UNROLL
    for (int block = 0; block < BLOCKS; block++) __builtin_prefetch(w + block * stride + PREFETCH_BYTES / 2);
    if constexpr (BF16_INPUTS == 1) {
      add_elements<1>(acc, x, tile_rows, w, stride);
      asm("" ::: "memory");  // otherwise the compiler loads both halves at once and spills registers
    }
    add_elements<0>(acc, x, tile_rows, w, stride);
  }
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++)
    SWARM_UNROLL
    for (int j = 0; j < N; j++) store(c + (r * N + j) * LANES, acc[r][j]);
}

// Several tiles of rows share the widening: a stretch of a block's weights is widened into the first-level cache, and
// sums wait in memory between stretches. With AVX-512 twelve rows at a time make that needless.
constexpr bool WIDENS_FOR_TILES = BF16_INPUTS == 1 && LANES < 16;
constexpr int64_t WIDE_INPUTS = 256, WIDE_TILES = 8;

// [in / 2][16][2] -> [in][16] in fp32, of each pair the second first. `in`: even.
inline void widen_block(const uint16_t* w, int64_t in, float* to) {
  for (int64_t k = 0; k < in; k += 2, w += 2 * BLOCK, to += 2 * BLOCK) {
    __builtin_prefetch(w + PREFETCH_BYTES / 2);
    SWARM_UNROLL
    for (int j = 0; j < VECS; j++) {
      const U pairs = load_words(w + j * 2 * LANES);
      store(to + j * LANES, high_half(pairs)), store(to + BLOCK + j * LANES, low_half(pairs));
    }
  }
}

// [ROWS] of a tile x a stretch of a widened block, added to c [ROWS][16]. `in`: even.
template <int ROWS>
void add_wide(const float* x, int64_t tile_rows, int64_t in, const float* wide, float* c) {
  V acc[ROWS][VECS];
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++)
    SWARM_UNROLL
    for (int j = 0; j < VECS; j++) acc[r][j] = load(c + (r * VECS + j) * LANES);
  const auto add = [&](const float* inputs, const float* weights) __attribute__((always_inline)) {
    V w[VECS];
    SWARM_UNROLL
    for (int j = 0; j < VECS; j++) w[j] = load(weights + j * LANES);
    SWARM_UNROLL
    for (int r = 0; r < ROWS; r++)
      SWARM_UNROLL
      for (int j = 0; j < VECS; j++) acc[r][j] += inputs[r] * w[j];
  };
  for (int64_t k = 0; k < in; k += 2, x += 2 * tile_rows, wide += 2 * BLOCK) {
    add(x + tile_rows, wide);
    add(x, wide + BLOCK);
  }
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++)
    SWARM_UNROLL
    for (int j = 0; j < VECS; j++) store(c + (r * VECS + j) * LANES, acc[r][j]);
}

}  // namespace SWARM_ISA
