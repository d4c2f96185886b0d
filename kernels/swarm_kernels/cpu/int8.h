// Sums of products for 8-bit weights. A row's inputs become integers in groups of 64, each with a step of its own; a
// group's products are summed exactly, and the groups' sums are added in rising order, each rounded by itself. So a
// row's result is bit for bit the same alone, among others, and on every instruction set.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace SWARM_ISA {

constexpr int64_t GROUP = 64;  // inputs that share a step
constexpr float LARGEST = 127.0f;
constexpr float TINY = 1e-30f;  // a group below this counts as zero: the inverse of its step must be finite

// A quad is 4 inputs of a row, or 4 weights of an output: one lane. Weights are stored plus 128. The dot-product
// instructions take unsigned times signed, so the quads' sums are too large by 128 times the sum of the inputs.
#if defined(__AVX512VNNI__)
typedef int8_t Quant;
constexpr bool UNSIGNED_WEIGHTS = true;
#else
typedef int16_t Quant;  // numbers 0 and 2 of the quad, then 1 and 3
constexpr bool UNSIGNED_WEIGHTS = SWARM_LANES > 4;
#endif
constexpr int64_t QUAD = 4 * sizeof(Quant);

// A tile, for each group: the rows' steps, what their sums start from, then quad after quad of all rows.
SWARM_INLINE int64_t group_bytes(int64_t tile_rows, int64_t quads) { return tile_rows * (8 + quads * QUAD); }
inline int64_t quantised_bytes(int64_t in) {
  const int64_t quads = (in + 3) / 4;
  return (in + GROUP - 1) / GROUP * 8 + quads * QUAD;
}

SWARM_INLINE I round_even(V v) {
#if defined(__AVX512F__)
  return (I)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
  return (I)_mm256_cvtps_epi32((__m256)v);
#elif defined(__SSE2__)
  return (I)_mm_cvtps_epi32((__m128)v);
#else
  I n;
  SWARM_UNROLL
  for (int i = 0; i < LANES; i++) n[i] = (int32_t)__builtin_nearbyintf(v[i]);
  return n;
#endif
}

// The largest magnitude of GROUP values; NaN if one is NaN, which as an integer is larger than any number.
SWARM_INLINE float peak_of(const float* values) {
  I most = {};
  for (int64_t k = 0; k < GROUP; k += LANES) {
    const I bits = (I)load(values + k) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t top = 0;
  for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
  float peak;
  std::memcpy(&peak, &top, sizeof peak);
  return peak;
}

SWARM_INLINE void put_quad(const Quant* numbers, char* to) {
  if constexpr (sizeof(Quant) == 1) {
    std::memcpy(to, numbers, QUAD);
  } else {
    const Quant quad[4] = {numbers[0], numbers[2], numbers[1], numbers[3]};
    std::memcpy(to, quad, QUAD);
  }
}

// Row `row` of a tile; scale * norm[k] multiply where norm is not null. A group of infinities or NaN has such a step.
inline void quantise(const float* x, int64_t in, float scale, const float* norm, int64_t tile_rows, int64_t row,
                     char* tile) {
  for (int64_t k = 0; k < in; k += GROUP) {
    const int64_t width = in - k < GROUP ? in - k : GROUP, quads = (width + 3) / 4;
    alignas(64) float values[GROUP] = {};
    for (int64_t i = 0; i < width; i++) values[i] = norm ? x[k + i] * scale * norm[k + i] : x[k + i];
    const float peak = peak_of(values), inverse = peak > TINY ? LARGEST / peak : 0.0f;
    alignas(64) Quant numbers[GROUP];
    I total = {};
    SWARM_UNROLL
    for (int64_t i = 0; i < GROUP; i += LANES) {
      typedef Quant Narrow __attribute__((vector_size(sizeof(Quant) * LANES)));
      const I rounded = round_even(load(values + i) * inverse);
      const Narrow narrow = __builtin_convertvector(rounded, Narrow);
      std::memcpy(numbers + i, &narrow, sizeof narrow);
      total += rounded;
    }
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += total[i];
    const float step = peak > TINY || peak != peak ? peak / LARGEST : 0.0f;
    const int32_t start = UNSIGNED_WEIGHTS ? -128 * sum : 0;
    std::memcpy(tile + 4 * row, &step, 4);
    std::memcpy(tile + 4 * (tile_rows + row), &start, 4);
    for (int64_t q = 0; q < quads; q++) put_quad(numbers + 4 * q, tile + 8 * tile_rows + (q * tile_rows + row) * QUAD);
    tile += group_bytes(tile_rows, quads);
  }
}

// Quads of LANES outputs, as the multiplication below takes them.
struct WeightQuads {
#if defined(__AVX512VNNI__)
  I all;
  SWARM_INLINE explicit WeightQuads(const uint8_t* w) : all((I)load_words(w)) {}
#elif SWARM_LANES > 4
  I even, odd;  // as 16-bit numbers
  SWARM_INLINE explicit WeightQuads(const uint8_t* w) {
    const U words = load_words(w);
    even = (I)(words & 0x00ff00ffu);
    odd = (I)(words >> 8 & 0x00ff00ffu);
  }
#else
  typedef int16_t S __attribute__((vector_size(4 * LANES)));
  S even, odd;
  SWARM_INLINE explicit WeightQuads(const uint8_t* w) {
    const S pairs = (S)(load_words(w) ^ 0x80808080u);
    even = pairs << 8 >> 8;
    odd = pairs >> 8;
  }
#endif
};

SWARM_INLINE I word_at(const char* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return I{} + word;
}

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

// [ROWS] of a tile x [BLOCKS] weight blocks, `stride` bytes apart -> c [ROWS][BLOCKS * 16], but for the weights' scales.
// `in`: a multiple of 4.
template <int ROWS, int BLOCKS>
void multiply(const char* x, int64_t tile_rows, int64_t in, const uint8_t* w, int64_t stride, float* c) {
  constexpr int N = BLOCKS * VECS;
  for (int i = 0; i < ROWS * N; i++) store(c + i * LANES, zero());
  for (int64_t k = 0; k < in; k += GROUP) {
    const int64_t quads = (in - k < GROUP ? in - k : GROUP) / 4;
    const char *steps = x, *starts = x + 4 * tile_rows, *quad = x + 8 * tile_rows;
    x += group_bytes(tile_rows, quads);
    I sums[ROWS][N];
    SWARM_UNROLL
    for (int r = 0; r < ROWS; r++)
      SWARM_UNROLL
      for (int j = 0; j < N; j++) sums[r][j] = word_at(starts + 4 * r);
    for (int64_t q = 0; q < quads; q++, w += 4 * BLOCK, quad += tile_rows * QUAD) {
      SWARM_UNROLL
      for (int j = 0; j < N; j++) {
        const uint8_t* at = w + (j / VECS) * stride + (j % VECS) * 4 * LANES;
        if (j % VECS == 0) __builtin_prefetch(at + AHEAD);
        const WeightQuads weights(at);
        SWARM_UNROLL
        for (int r = 0; r < ROWS; r++) sums[r][j] = add_products(sums[r][j], weights, quad + r * QUAD);
      }
    }
    SWARM_UNROLL
    for (int r = 0; r < ROWS; r++)
      SWARM_UNROLL
      for (int j = 0; j < N; j++) {
        float* to = c + (r * N + j) * LANES;
        const V part = __builtin_convertvector(sums[r][j], V) * (V)word_at(steps + 4 * r);
        store(to, load(to) + rounded(part));
      }
  }
}

}  // namespace SWARM_ISA
