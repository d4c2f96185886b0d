// A vector of floats as wide as the instruction set this file is compiled for. GCC/Clang vector extensions, but for one
// load, so one source serves AVX-512, AVX2, SSE2 and NEON.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512BF16__)
#define SWARM_ISA avx512bf16
#define SWARM_LANES 16
#elif defined(__AVX512VNNI__)
#define SWARM_ISA avx512vnni
#define SWARM_LANES 16
#elif defined(__AVX512F__)
#define SWARM_ISA avx512
#define SWARM_LANES 16
#elif defined(__AVX2__)
#define SWARM_ISA avx2
#define SWARM_LANES 8
#else
#define SWARM_ISA generic
#define SWARM_LANES 4
#endif

#if defined(__clang__)
#define SWARM_UNROLL _Pragma("unroll")
#define SWARM_NO_UNROLL _Pragma("nounroll")
#else
#define SWARM_UNROLL _Pragma("GCC unroll 64")
#define SWARM_NO_UNROLL _Pragma("GCC unroll 1")
#endif
#define SWARM_INLINE inline __attribute__((always_inline))
#define SWARM_NOINLINE __attribute__((noinline))  // its own register allocation

namespace SWARM_ISA {

constexpr int LANES = SWARM_LANES;
constexpr int BLOCK = 16;            // outputs of a weight block, tokens of a KV block
constexpr int VECS = BLOCK / LANES;  // vectors in a block

// Software prefetch distance in bytes: the hardware prefetcher stops at each 4 KB page, and weights are read once per
// step.
constexpr int64_t PREFETCH_BYTES = 2048;

typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t H __attribute__((vector_size(2 * LANES)));

SWARM_INLINE V load(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
SWARM_INLINE U load_words(const void* p) {
  U v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
SWARM_INLINE void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }
SWARM_INLINE V zero() { return V{}; }
SWARM_INLINE V splat(float x) { return V{} + x; }
SWARM_INLINE V max(V a, V b) { return a > b ? a : b; }

// A product that is not to be fused with a sum: rounded alike on every instruction set.
SWARM_INLINE V rounded(V product) {
#if defined(__x86_64__) || defined(__i386__)
  asm("" : "+v"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#endif
  return product;
}

// bf16 is the upper half of an fp32.
SWARM_INLINE V low_half(U pair) { return (V)(pair << 16); }
SWARM_INLINE V high_half(U pair) { return (V)(pair & 0xffff0000u); }
SWARM_INLINE V load(const uint16_t* p) {
#if defined(__AVX512F__)  // GCC 12 widens in two halves and joins them
  return (V)((U)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)) << 16);
#elif defined(__AVX2__)
  return (V)((U)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16);
#else
  H h;
  std::memcpy(&h, p, sizeof h);
  return (V)(__builtin_convertvector(h, U) << 16);
#endif
}
// The upper halves are the nearest bf16, of two the even one; NaN stays NaN.
SWARM_INLINE U nearest_bf16(V v) {
  const U bits = (U)v;
  return v == v ? bits + 0x7fffu + (bits >> 16 & 1u) : bits | 0x400000u;
}
SWARM_INLINE V rounded_to_bf16(V v) { return (V)(nearest_bf16(v) & 0xffff0000u); }
SWARM_INLINE void store_halves(uint16_t* p, U upper) {
  const H halves = __builtin_convertvector(upper >> 16, H);
  std::memcpy(p, &halves, sizeof halves);
}
SWARM_INLINE uint16_t to_bf16(float x) {  // the same
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

// Lane i takes lane i + BY (mod LANES).
template <int BY>
SWARM_INLINE V rotate(V v) {
#if defined(__clang__)
#if SWARM_LANES == 16
  return __builtin_shufflevector(v, v, BY, BY + 1, BY + 2, BY + 3, BY + 4, BY + 5, BY + 6, BY + 7, BY + 8, BY + 9,
                                 BY + 10, BY + 11, BY + 12, BY + 13, BY + 14, BY + 15);
#elif SWARM_LANES == 8
  return __builtin_shufflevector(v, v, BY, BY + 1, BY + 2, BY + 3, BY + 4, BY + 5, BY + 6, BY + 7);
#else
  return __builtin_shufflevector(v, v, BY, BY + 1, BY + 2, BY + 3);
#endif
#else
  I from;
  SWARM_UNROLL
  for (int i = 0; i < LANES; i++) from[i] = (i + BY) % LANES;
  return __builtin_shuffle(v, from);
#endif
}

// Four floats, for transposing.
typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadIndex __attribute__((vector_size(16)));
SWARM_INLINE Quad load4(const float* p) {
  Quad v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
SWARM_INLINE void store4(float* p, Quad v) { std::memcpy(p, &v, sizeof v); }
#if defined(__clang__)
#define SWARM_SHUFFLE4(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SWARM_SHUFFLE4(a, b, i, j, k, l) __builtin_shuffle(a, b, QuadIndex{i, j, k, l})
#endif
SWARM_INLINE Quad interleave_low(Quad a, Quad b) { return SWARM_SHUFFLE4(a, b, 0, 4, 1, 5); }
SWARM_INLINE Quad interleave_high(Quad a, Quad b) { return SWARM_SHUFFLE4(a, b, 2, 6, 3, 7); }
SWARM_INLINE Quad join_low(Quad a, Quad b) { return SWARM_SHUFFLE4(a, b, 0, 1, 4, 5); }
SWARM_INLINE Quad join_high(Quad a, Quad b) { return SWARM_SHUFFLE4(a, b, 2, 3, 6, 7); }

// Lanes are folded in a fixed order, so sums do not depend on anything but the instruction set.
template <int HALF = LANES / 2>
SWARM_INLINE float sum(V v) {
  v += rotate<HALF>(v);
  if constexpr (HALF > 1) return sum<HALF / 2>(v);
  return v[0];
}
template <int HALF = LANES / 2>
SWARM_INLINE float largest(V v) {
  v = max(v, rotate<HALF>(v));
  if constexpr (HALF > 1) return largest<HALF / 2>(v);
  return v[0];
}

// 2^x for -126 <= x < 128, 2^-126 below (Cephes' exp2f, about 2 ulp); NaN stays NaN.
SWARM_INLINE V exp2(V x) {
  x = max(splat(-126.0f), x);  // in this order: NaN is the second
  V shifted = x + 12582912.0f;  // 1.5 * 2^23: leaves the nearest integer in the low bits of the mantissa
  V f = x - (shifted - 12582912.0f);
  V p = f * 1.535336188319500e-4f + 1.339887440266574e-3f;
  p = p * f + 9.618437357674640e-3f;
  p = p * f + 5.550332471162809e-2f;
  p = p * f + 2.402264791363012e-1f;
  p = p * f + 6.931472028550421e-1f;
  p = p * f + 1.0f;
  return p * (V)(((U)shifted << 23) + (127u << 23));
}
constexpr float LOG2_E = 1.44269504088896f;
SWARM_INLINE V sigmoid(V x) {
  V power = x * -LOG2_E;
  return 1.0f / (1.0f + exp2(power > 126.0f ? splat(126.0f) : power));
}

SWARM_INLINE V gelu_tanh(V x) {  // (1 + tanh(y)) / 2 is the sigmoid of 2 y
  const V inner = x + 0.044715f * x * x * x;
  return x * sigmoid(1.5957691216057308f * inner);
}
// The error function to 1.5e-7 (Abramowitz and Stegun, 7.1.26); NaN stays NaN.
SWARM_INLINE V erf(V x) {
  const V size = x < 0.0f ? -x : x, t = 1.0f / (1.0f + 0.3275911f * size);
  V p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const V value = 1.0f - p * t * exp2(size * size * -LOG2_E);
  return x < 0.0f ? -value : value;
}

}  // namespace SWARM_ISA
