// Micro-kernel for 4-bit weights: 32 inputs of an output share a scale and a minimum. Sums over 32 products are exact
// integers; later operations are rounded one by one in ascending order of k. Hence results are batch-invariant and bit
// for bit the same on every instruction set.
#pragma once
#include "quantize_rows.h"

namespace SWARM_ISA {

constexpr int64_t WEIGHT_GROUP = GROUP / 2;  // inputs that share a scale and a minimum

// 32 inputs of 16 outputs. A weight is its number, 0 to 15, times the scale, plus the minimum.
struct Int4Block {
  uint16_t scale[BLOCK], minimum[BLOCK];  // fp16
  uint8_t pairs[WEIGHT_GROUP / 8][BLOCK][4];   // two quads of an output: the first in the low nibbles
};

// fp16 -> fp32, exactly; not for infinity and NaN.
SWARM_INLINE V load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  H half;
  std::memcpy(&half, p, sizeof half);
  const U bits = __builtin_convertvector(half, U);
  const V size = (V)((bits & 0x7fffu) << 13) * 0x1p112f;  // the exponent biases differ by 112
  return (V)((U)size | (bits & 0x8000u) << 16);
#endif
}

// Sums over one weight group. 16 products of at most 127 * 15 fit 16 bits; without dot-product instructions, 16-bit
// sums need half as many instructions.
#if defined(__AVX512VNNI__)
typedef Tile<int8_t> Tile4;
typedef I GroupSums;
SWARM_INLINE I add_group_products(I sums, U words, const char* quad) {
  return (I)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)words, (__m512i)word_at(quad));
}
SWARM_INLINE I widen_sums(I sums) { return sums; }
#else
typedef int16_t GroupSums __attribute__((vector_size(4 * LANES)));
#if defined(__AVX512F__)
typedef Tile<int8_t> Tile4;
SWARM_INLINE GroupSums add_group_products(GroupSums sums, U words, const char* quad) {
  return sums + (GroupSums)_mm512_maddubs_epi16((__m512i)words, (__m512i)word_at(quad));
}
#elif defined(__AVX2__)
typedef Tile<int8_t> Tile4;
SWARM_INLINE GroupSums add_group_products(GroupSums sums, U words, const char* quad) {
  return sums + (GroupSums)_mm256_maddubs_epi16((__m256i)words, (__m256i)word_at(quad));
}
#else
typedef Tile<int16_t> Tile4;
SWARM_INLINE GroupSums add_group_products(GroupSums sums, U words, const char* quad) {
  const GroupSums even = (GroupSums)(words & 0x00ff00ffu), odd = (GroupSums)(words >> 8 & 0x00ff00ffu);
  return sums + even * (GroupSums)word_at(quad) + odd * (GroupSums)word_at(quad + 4);
}
#endif
SWARM_INLINE I widen_sums(GroupSums sums) {
#if defined(__AVX512F__)
  return (I)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  return (I)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#else
  return ((I)sums >> 16) + ((I)((U)sums << 16) >> 16);
#endif
}
#endif

// [ROWS] of a tile x [BLOCKS] weight blocks, `stride` Int4Blocks apart -> c [ROWS][BLOCKS * 16]. `in`: a multiple of
// 32.
template <int ROWS, int BLOCKS>
void micro_kernel(const char* x, int64_t tile_rows, int64_t in, const Int4Block* w, int64_t stride, float* c) {
  constexpr int N = BLOCKS * VECS, TOGETHER = together(N);
  for (int i = 0; i < ROWS * N; i++) store(c + i * LANES, zero());
  for (int64_t k = 0; k < in; k += WEIGHT_GROUP, w++) {
    const char* group = x + k / GROUP * tile_rows * Tile4::GROUP_ROW_BYTES;
    const int64_t half = k % GROUP / WEIGHT_GROUP;
    const char* steps = Tile4::head(group, tile_rows, STEP);
    const char* wholes = Tile4::head(group, tile_rows, half ? HIGH_SUM : LOW_SUM);
    SWARM_UNROLL
    for (int start = 0; start < N; start += TOGETHER) {
      const char* quad = Tile4::quads(group, tile_rows) + half * WEIGHT_GROUP / 4 * tile_rows * Tile4::QUAD;
      GroupSums sums[ROWS][TOGETHER];
      SWARM_UNROLL
      for (int r = 0; r < ROWS; r++)
        SWARM_UNROLL
        for (int i = 0; i < TOGETHER; i++) sums[r][i] = GroupSums{};
      SWARM_NO_UNROLL  // otherwise sums are spilled
      for (int64_t q = 0; q < WEIGHT_GROUP / 8; q++, quad += 2 * tile_rows * Tile4::QUAD) {
        SWARM_UNROLL
        for (int i = 0; i < TOGETHER; i++) {
          const int j = start + i;
          const uint8_t* at = w[j / VECS * stride].pairs[q][j % VECS * LANES];
          if (j % VECS == 0) __builtin_prefetch(at + PREFETCH_BYTES);
          const U words = load_words(at);
          const U first = words & 0x0f0f0f0fu, second = words >> 4 & 0x0f0f0f0fu;
          SWARM_UNROLL
          for (int r = 0; r < ROWS; r++) sums[r][i] = add_group_products(sums[r][i], first, quad + r * Tile4::QUAD);
          SWARM_UNROLL
          for (int r = 0; r < ROWS; r++)
            sums[r][i] = add_group_products(sums[r][i], second, quad + (tile_rows + r) * Tile4::QUAD);
        }
      }
      SWARM_UNROLL
      for (int i = 0; i < TOGETHER; i++) {
        const int j = start + i;
        const Int4Block& at = w[j / VECS * stride];
        const V scale = load_half(at.scale + j % VECS * LANES), minimum = load_half(at.minimum + j % VECS * LANES);
        SWARM_UNROLL
        for (int r = 0; r < ROWS; r++) {
          float* to = c + (r * N + j) * LANES;
          const V part = rounded(__builtin_convertvector(widen_sums(sums[r][i]), V) * scale) +
                         rounded((V)word_at(wholes + 4 * r) * minimum);
          store(to, load(to) + rounded(part * (V)word_at(steps + 4 * r)));
        }
      }
    }
  }
}

}  // namespace SWARM_ISA
