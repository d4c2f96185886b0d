// Micro-kernel for 8-bit weights. Integer sums of a group's products are exact, and the groups' sums are added in
// ascending order, each rounded by itself. Hence results are batch-invariant and bit for bit the same on every
// instruction set.
#pragma once
#include "quantize_rows.h"

namespace SWARM_ISA {

// Weights are stored with a zero point of 128, because the dot-product instructions multiply unsigned by signed; sums
// start from -128 times the sum of the inputs to correct for it.
#if defined(__AVX512VNNI__)
typedef Tile<int8_t> Tile8;
constexpr bool UNSIGNED_WEIGHTS = true;
#else
typedef Tile<int16_t> Tile8;
constexpr bool UNSIGNED_WEIGHTS = SWARM_LANES > 4;
#endif

// A quad of each of LANES outputs, in the order of memory, as the multiplication below takes them.
struct WeightQuads {
#if defined(__AVX512VNNI__)
  I all;
  SWARM_INLINE explicit WeightQuads(U words) : all((I)words) {}
#elif SWARM_LANES > 4
  I even, odd;  // as 16-bit numbers
  SWARM_INLINE explicit WeightQuads(U words) : even((I)(words & 0x00ff00ffu)), odd((I)(words >> 8 & 0x00ff00ffu)) {}
#else
  typedef int16_t S __attribute__((vector_size(4 * LANES)));
  S even, odd;
  SWARM_INLINE explicit WeightQuads(U words) : even((S)words << 8 >> 8), odd((S)words >> 8) {}
#endif
};

// sums + weights * the quad of one row.
SWARM_INLINE I add_products(I sums, const WeightQuads& w, const char* quad) {
#if defined(__AVX512VNNI__)
  return (I)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w.all, (__m512i)word_at(quad));
#elif defined(__AVX512F__)
  sums += (I)_mm512_madd_epi16((__m512i)w.even, (__m512i)word_at(quad));
  return sums + (I)_mm512_madd_epi16((__m512i)w.odd, (__m512i)word_at(quad + 4));
#elif defined(__AVX2__)
  sums += (I)_mm256_madd_epi16((__m256i)w.even, (__m256i)word_at(quad));
  return sums + (I)_mm256_madd_epi16((__m256i)w.odd, (__m256i)word_at(quad + 4));
#else  // two products of 7 bits and a sign fit 16 bits
  typedef WeightQuads::S S;
  const I pairs = (I)(w.even * (S)word_at(quad) + w.odd * (S)word_at(quad + 4));
  return sums + (pairs >> 16) + ((I)((U)pairs << 16) >> 16);
#endif
}

// [ROWS] of a tile x [BLOCKS] weight blocks, `stride` bytes apart -> c [ROWS][BLOCKS * 16], but for the weights'
// scales. `in`: a multiple of 4.
template <int ROWS, int BLOCKS>
void micro_kernel(const char* x, int64_t tile_rows, int64_t in, const uint8_t* w, int64_t stride, float* c) {
  constexpr int N = BLOCKS * VECS, TOGETHER = together(N);
  for (int i = 0; i < ROWS * N; i++) store(c + i * LANES, zero());
  for (int64_t k = 0; k < in; k += GROUP, x += tile_rows * Tile8::GROUP_ROW_BYTES, w += GROUP * BLOCK) {
    const int64_t quads = (in - k < GROUP ? in - k : GROUP) / 4;
    const char *steps = Tile8::head(x, tile_rows, STEP), *starts = Tile8::head(x, tile_rows, ZERO_POINT);
    SWARM_UNROLL
    for (int first = 0; first < N; first += TOGETHER) {
      const char* quad = Tile8::quads(x, tile_rows);
      I sums[ROWS][TOGETHER];
      SWARM_UNROLL
      for (int r = 0; r < ROWS; r++)
        SWARM_UNROLL
        for (int i = 0; i < TOGETHER; i++) sums[r][i] = UNSIGNED_WEIGHTS ? word_at(starts + 4 * r) : I{};
      for (int64_t q = 0; q < quads; q++, quad += tile_rows * Tile8::QUAD) {
        SWARM_UNROLL
        for (int i = 0; i < TOGETHER; i++) {
          const int j = first + i;
          const uint8_t* at = w + q * 4 * BLOCK + (j / VECS) * stride + (j % VECS) * 4 * LANES;
          if (j % VECS == 0) __builtin_prefetch(at + PREFETCH_BYTES);
          const WeightQuads weights(UNSIGNED_WEIGHTS ? load_words(at) : load_words(at) ^ 0x80808080u);
          SWARM_UNROLL
          for (int r = 0; r < ROWS; r++) sums[r][i] = add_products(sums[r][i], weights, quad + r * Tile8::QUAD);
        }
      }
      SWARM_UNROLL
      for (int r = 0; r < ROWS; r++)
        SWARM_UNROLL
        for (int i = 0; i < TOGETHER; i++) {
          float* to = c + (r * N + first + i) * LANES;
          const V part = __builtin_convertvector(sums[r][i], V) * (V)word_at(steps + 4 * r);
          store(to, load(to) + rounded(part));
        }
    }
  }
}

}  // namespace SWARM_ISA
