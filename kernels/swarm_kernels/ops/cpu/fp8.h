// Micro-kernel for weights of E4M3 (1 sign, 4 exponent and 3 mantissa bits, the exponent's bias is 7) with a scale for
// each 128 inputs of an output (fp8_linear.py). Weights are widened to bf16 in registers, which is exact, and multiplied
// by inputs rounded to bf16 as bf16.h does it; the sums of 128 inputs times their scale are rounded and added in
// ascending order. Hence results are batch-invariant and bit for bit the same on every instruction set.
#pragma once
#include <type_traits>

#include "bf16.h"

namespace SWARM_ISA {

constexpr int64_t FP8_GROUP = 128;  // inputs of an output that share a scale

// A byte of a weight block: [in / 4][16][4] codes, of inputs 0, 2, 1 and 3 of a quad, then fp32 scales [groups][16].
struct Fp8Codes {
  uint8_t byte;
  static int64_t block_bytes(int64_t in) {
    return in * BLOCK + (in + FP8_GROUP - 1) / FP8_GROUP * BLOCK * (int64_t)sizeof(float);
  }
};

// Inputs 2 * PAIR and 2 * PAIR + 1 of a quad as bf16, divided by EXPONENT_SCALE. NaN is taken for 480.
#if defined(__AVX512F__)
constexpr float EXPONENT_SCALE = 1.0f;
template <int PAIR>
SWARM_INLINE U pair_of(U quads) {
  const __m512i low = PAIR ? _mm512_srli_epi16((__m512i)quads, 8) : (__m512i)quads;
  const __m512i high = PAIR ? (__m512i)quads : _mm512_slli_epi16((__m512i)quads, 8);
  const __m512i size = _mm512_and_si512(_mm512_srli_epi16(high, 4), _mm512_set1_epi16(0x07f0));
  const __m512i normal = _mm512_add_epi16(size, _mm512_set1_epi16(120 << 7));  // the exponent biases differ by 120
  const __mmask32 subnormal = _mm512_testn_epi16_mask(high, _mm512_set1_epi16(0x7800));
  const __m512i eighths =  // of 2^-6, by the three bits of the mantissa
      _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const __m512i sizes = _mm512_mask_permutexvar_epi16(normal, subnormal, low, eighths);
  const __m512i sign = _mm512_set1_epi16((short)0x8000);
  return (U)_mm512_ternarylogic_epi64(sizes, high, sign, 0xf8);  // sizes | (high & sign)
}
#else  // subnormal numbers cost time, but weights that are scaled to their largest have next to none
constexpr float EXPONENT_SCALE = 0x1p120f;  // the exponent biases differ by 120
template <int PAIR>
SWARM_INLINE U pair_of(U quads) {
  const U high = PAIR ? quads : quads << 8;
  return (high & 0x7f007f00u) >> 4 | (high & 0x80008000u);
}
#endif

// sums [ROWS][N] with pair PAIR of the quads.
template <int PAIR, int ROWS, int N>
SWARM_INLINE void add_pairs(V (&sums)[ROWS][N], const U (&quads)[N], const Bf16Input* x, int64_t tile_rows) {
  U pairs[N];
  SWARM_UNROLL
  for (int j = 0; j < N; j++) pairs[j] = pair_of<PAIR>(quads[j]);
  const auto add = [&](auto element, const Bf16Input* inputs) __attribute__((always_inline)) {
    V weights[N];
    SWARM_UNROLL
    for (int j = 0; j < N; j++) {
      weights[j] = weights_of<decltype(element)::value>(pairs[j]);
      if constexpr (EXPONENT_SCALE != 1.0f) weights[j] = rounded(weights[j] * EXPONENT_SCALE);
    }
    SWARM_UNROLL
    for (int r = 0; r < ROWS; r++)
      SWARM_UNROLL
      for (int j = 0; j < N; j++) sums[r][j] = add_products(sums[r][j], weights[j], inputs[r]);
  };
  if constexpr (BF16_INPUTS == 1) add(std::integral_constant<int, 1>(), x + (2 * PAIR + 1) * tile_rows);
  add(std::integral_constant<int, 0>(), x + 2 / BF16_INPUTS * PAIR * tile_rows);
}

// [ROWS] of a tile x [BLOCKS] weight blocks, `stride` bytes apart -> c [ROWS][BLOCKS * 16]. `in`: a multiple of 4.
template <int ROWS, int BLOCKS>
void micro_kernel(const Bf16Input* x, int64_t tile_rows, int64_t in, const Fp8Codes* w, int64_t stride, float* c) {
  constexpr int N = BLOCKS * VECS;
  for (int i = 0; i < ROWS * N; i++) store(c + i * LANES, zero());
  const uint8_t* codes = &w->byte;
  const uint8_t* scales = codes + in * BLOCK;
  for (int64_t begin = 0; begin < in; begin += FP8_GROUP, scales += BLOCK * sizeof(float)) {
    const int64_t end = in - begin < FP8_GROUP ? in : begin + FP8_GROUP;
    V sums[ROWS][N];
    SWARM_UNROLL
    for (int r = 0; r < ROWS; r++)
      SWARM_UNROLL
      for (int j = 0; j < N; j++) sums[r][j] = zero();
    for (int64_t k = begin; k < end; k += 4, codes += 4 * BLOCK, x += 4 / BF16_INPUTS * tile_rows) {
      U quads[N];
      SWARM_UNROLL
      for (int j = 0; j < N; j++) {
        const uint8_t* at = codes + j / VECS * stride + j % VECS * 4 * LANES;
        if (j % VECS == 0) __builtin_prefetch(at + PREFETCH_BYTES);
        quads[j] = load_words(at);
      }
      add_pairs<0>(sums, quads, x, tile_rows);
      add_pairs<1>(sums, quads, x, tile_rows);
    }
    SWARM_UNROLL
    for (int j = 0; j < N; j++) {
      const V scale = load(reinterpret_cast<const float*>(scales + j / VECS * stride) + j % VECS * LANES);
      SWARM_UNROLL
      for (int r = 0; r < ROWS; r++) {
        float* to = c + (r * N + j) * LANES;
        store(to, load(to) + rounded(sums[r][j] * scale));
      }
    }
  }
}

}  // namespace SWARM_ISA
