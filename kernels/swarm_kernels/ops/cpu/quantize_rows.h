// Dynamic quantization of activations to int8, for 8 and 4-bit weights. Each group of 64 inputs of a row has its own
// scale, so an outlier costs only its group precision.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace SWARM_ISA {

constexpr int64_t GROUP = 64;  // inputs that share a scale
constexpr float LARGEST = 127.0f;
constexpr float TINY = 1e-30f;  // smaller groups become zeros: the inverse of the scale must be finite

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

// Of all lanes.
template <int HALF = LANES / 2>
SWARM_INLINE int32_t largest(I v) {
  const I other = (I)rotate<HALF>((V)v);
  v = other > v ? other : v;
  if constexpr (HALF > 1) return largest<HALF / 2>(v);
  return v[0];
}
template <int HALF = LANES / 2>
SWARM_INLINE int32_t sum(I v) {
  v += (I)rotate<HALF>((V)v);
  if constexpr (HALF > 1) return sum<HALF / 2>(v);
  return v[0];
}

// The largest magnitude of GROUP values; NaN if one is NaN, which as an integer is larger than any number.
SWARM_INLINE float peak_of(const float* values) {
  I most = {};
  for (int64_t k = 0; k < GROUP; k += LANES) {
    const I bits = (I)load(values + k) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  const int32_t top = largest(most);
  float peak;
  std::memcpy(&peak, &top, sizeof peak);
  return peak;
}

// A tile is made of groups, zero-padded; each has these words of every row, then quad after quad of all rows. A quad is
// 4 inputs of a row: a word of int8, or as int16 numbers 0 and 2, then 1 and 3.
enum TileHeader {
  STEP,        // fp32 scale
  ZERO_POINT,  // int32: -128 times the sum of the integers
  LOW_SUM,     // fp32: of the first half's integers
  HIGH_SUM,    // and of the last half's
  HEADER_WORDS
};
template <typename Quant>
struct Tile {
  static constexpr int64_t QUAD = 4 * sizeof(Quant);
  static constexpr int64_t GROUP_ROW_BYTES = 4 * HEADER_WORDS + GROUP / 4 * QUAD;  // of one row in one group
  static const char* head(const char* group, int64_t rows, int word) { return group + 4 * word * rows; }
  static const char* quads(const char* group, int64_t rows) { return head(group, rows, HEADER_WORDS); }

  // Row `row`; scale * norm[k] multiply where norm is not null. A group with infinities or NaN has such a scale.
  static void fill_row(const float* x, int64_t in, float scale, const float* norm, int64_t tile_rows, int64_t row,
                       char* tile) {
    constexpr int ORDER[4] = {0, QUAD == 4 ? 1 : 2, QUAD == 4 ? 2 : 1, 3};
    for (int64_t k = 0; k < in; k += GROUP, tile += tile_rows * GROUP_ROW_BYTES) {
      const int64_t width = in - k < GROUP ? in - k : GROUP;
      alignas(64) float values[GROUP] = {};
      for (int64_t i = 0; i < width; i++) values[i] = norm ? x[k + i] * scale * norm[k + i] : x[k + i];
      const float peak = peak_of(values), inverse = peak > TINY ? LARGEST / peak : 0.0f;
      alignas(64) Quant numbers[GROUP];
      int32_t sums[2];
      SWARM_UNROLL
      for (int half = 0; half < 2; half++) {
        I total = {};
        SWARM_UNROLL
        for (int64_t i = half * GROUP / 2; i < (half + 1) * GROUP / 2; i += LANES) {
          typedef Quant Narrow __attribute__((vector_size(sizeof(Quant) * LANES)));
          const I rounded = round_even(load(values + i) * inverse);
          const Narrow narrow = __builtin_convertvector(rounded, Narrow);
          std::memcpy(numbers + i, &narrow, sizeof narrow);
          total += rounded;
        }
        sums[half] = sum(total);
      }
      const float step = peak > TINY || peak != peak ? peak / LARGEST : 0.0f;
      const int32_t zero_point = -128 * (sums[0] + sums[1]);
      const float low = (float)sums[0], high = (float)sums[1];
      const void* words[HEADER_WORDS] = {&step, &zero_point, &low, &high};
      for (int word = 0; word < HEADER_WORDS; word++) std::memcpy(tile + 4 * (word * tile_rows + row), words[word], 4);
      char* quads = tile + 4 * HEADER_WORDS * tile_rows + row * QUAD;
      for (int64_t q = 0; q < GROUP / 4; q++, quads += tile_rows * QUAD) {
        Quant quad[4];
        for (int i = 0; i < 4; i++) quad[i] = numbers[4 * q + ORDER[i]];
        std::memcpy(quads, quad, QUAD);
      }
    }
  }
};

// How many of N vectors of a block's sums a kernel keeps at once: with 32 registers all of them, so that each input is
// loaded once; with 16 one, so that no sum is spilled.
constexpr int together(int vectors) { return LANES == 16 ? vectors : 1; }

SWARM_INLINE I word_at(const char* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return I{} + word;
}

}  // namespace SWARM_ISA
