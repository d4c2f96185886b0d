// Micro-kernel for weights of 4-bit codes: each stands for one of 16 whole numbers, and 32 inputs of an output share a
// scale (codebook_linear.py). Sums over 32 products are exact integers; later operations are rounded one by one in
// ascending order of k. Hence results are batch-invariant and bit for bit the same on every instruction set.
#pragma once
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <type_traits>

#include "int4.h"
#include "int8.h"

namespace SWARM_ISA {

// A byte of a weight block: the codes of 16 outputs, [in / 32][4][16][4] pairs as in Int4Block, then their scales; in
// all a multiple of 64 bytes.
template <typename Scales>
struct Codes {
  uint8_t byte;
  static constexpr int64_t PAIR_BYTES = WEIGHT_GROUP / 2 * BLOCK;  // of a group
  static int64_t block_bytes(int64_t in) {
    const int64_t groups = in / WEIGHT_GROUP;
    return (groups * PAIR_BYTES + Scales::bytes(groups) + 63) / 64 * 64;
  }
};

// 16 bytes as whole numbers, those of vector `j`.
template <typename Byte>
SWARM_INLINE I load_bytes(const uint8_t* p, int j) {
#if defined(__AVX512F__)  // GCC 12 widens in four quarters and joins them
  const __m128i all = _mm_loadu_si128((const __m128i*)(p + j * LANES));
  return (I)(std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(all) : _mm512_cvtepu8_epi32(all));
#elif defined(__AVX2__)
  const __m128i all = _mm_loadl_epi64((const __m128i*)(p + j * LANES));
  return (I)(std::is_signed_v<Byte> ? _mm256_cvtepi8_epi32(all) : _mm256_cvtepu8_epi32(all));
#else
  typedef Byte B __attribute__((vector_size(LANES)));
  B bytes;
  std::memcpy(&bytes, p + j * LANES, sizeof bytes);
  return __builtin_convertvector(bytes, I);
#endif
}

// MXFP4: 2^(byte - 127), halved since its numbers are doubled. [groups][16]
struct PowersOfTwo {
  static constexpr int8_t NUMBERS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  static int64_t bytes(int64_t groups) { return groups * BLOCK; }
  static SWARM_INLINE V at(const uint8_t* scales, int64_t, int64_t group, int j) {
    const U exponent = (U)load_bytes<uint8_t>(scales + group * BLOCK, j);
    const U subnormal = (U)(exponent == 0u) & 0x400000u;
    return (V)(exponent << 23 | subnormal) * 0.5f;
  }
};

struct Iq4Numbers {
  static constexpr int8_t NUMBERS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
};
// IQ4_NL: fp16 [groups][16].
struct Halves : Iq4Numbers {
  static int64_t bytes(int64_t groups) { return groups * 2 * BLOCK; }
  static SWARM_INLINE V at(const uint8_t* scales, int64_t, int64_t group, int j) {
    return load_half(reinterpret_cast<const uint16_t*>(scales + group * 2 * BLOCK) + j * LANES);
  }
};
// IQ4_XS: int8 [groups][16], times fp16 [groups / 8][16]; the product is exact.
struct Factors : Iq4Numbers {
  static int64_t bytes(int64_t groups) { return groups * BLOCK + groups / 8 * 2 * BLOCK; }
  static SWARM_INLINE V at(const uint8_t* scales, int64_t groups, int64_t group, int j) {
    const V factor = __builtin_convertvector(load_bytes<int8_t>(scales + group * BLOCK, j), V);
    const uint8_t* units = scales + groups * BLOCK + group / 8 * 2 * BLOCK;
    return factor * load_half(reinterpret_cast<const uint16_t*>(units) + j * LANES);
  }
};
// NF4: fp32 [groups / 2][16], of the numbers divided by 112.
struct Normals {
  static constexpr int8_t NUMBERS[16] = {-112, -78, -59, -44, -32, -21, -10, 0, 9, 18, 28, 38, 49, 63, 81, 112};
  static int64_t bytes(int64_t groups) { return groups / 2 * BLOCK * (int64_t)sizeof(float); }
  static SWARM_INLINE V at(const uint8_t* scales, int64_t, int64_t group, int j) {
    return rounded(load(reinterpret_cast<const float*>(scales) + group / 2 * BLOCK + j * LANES) * (1.0f / 112.0f));
  }
};
typedef Codes<PowersOfTwo> Mxfp4Codes;
typedef Codes<Halves> Iq4NlCodes;
typedef Codes<Factors> Iq4XsCodes;
typedef Codes<Normals> Nf4Codes;

// A table of numbers as int8.h multiplies them.
struct CodeTable {
  alignas(16) uint8_t bytes[16];
  SWARM_INLINE explicit CodeTable(const int8_t (&numbers)[16]) {
    for (int i = 0; i < 16; i++) bytes[i] = (uint8_t)(numbers[i] + (UNSIGNED_WEIGHTS ? 128 : 0));
  }
  // The numbers of the codes 0 to 15 in the bytes of `codes`.
  SWARM_INLINE U operator[](U codes) const {
#if defined(__AVX512F__)
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)bytes));
    return (U)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif defined(__AVX2__)
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)bytes));
    return (U)_mm256_shuffle_epi8(table, (__m256i)codes);
#elif defined(__aarch64__)
    return (U)vqtbl1q_u8(vld1q_u8(bytes), (uint8x16_t)codes);
#else
    uint8_t each[sizeof codes];
    std::memcpy(each, &codes, sizeof each);
    for (uint8_t& one : each) one = bytes[one];
    return load_words(each);
#endif
  }
};

// [ROWS] of a tile x [BLOCKS] weight blocks, `stride` bytes apart -> c [ROWS][BLOCKS * 16]. `in`: a multiple of 32.
template <int ROWS, int BLOCKS, typename Scales>
void micro_kernel(const char* x, int64_t tile_rows, int64_t in, const Codes<Scales>* w, int64_t stride, float* c) {
  constexpr int N = BLOCKS * VECS;
  constexpr int64_t PAIR_BYTES = Codes<Scales>::PAIR_BYTES;
  const CodeTable numbers(Scales::NUMBERS);
  const int64_t groups = in / WEIGHT_GROUP;
  const uint8_t* pairs = &w->byte;
  const uint8_t* scales = pairs + groups * PAIR_BYTES;
  V totals[ROWS][N];
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++)
    SWARM_UNROLL
    for (int j = 0; j < N; j++) totals[r][j] = zero();
  for (int64_t g = 0; g < groups; g++) {
    const char* group = x + g / 2 * tile_rows * Tile8::GROUP_ROW_BYTES;
    const char* steps = Tile8::head(group, tile_rows, STEP);
    const char* wholes = Tile8::head(group, tile_rows, g % 2 ? HIGH_SUM : LOW_SUM);
    const char* quad = Tile8::quads(group, tile_rows) + g % 2 * WEIGHT_GROUP / 4 * tile_rows * Tile8::QUAD;
    I sums[ROWS][N];
    SWARM_UNROLL
    for (int r = 0; r < ROWS; r++) {
      const I start = __builtin_convertvector((V)word_at(wholes + 4 * r), I) * -128;
      SWARM_UNROLL
      for (int j = 0; j < N; j++) sums[r][j] = UNSIGNED_WEIGHTS ? start : I{};
    }
    for (int64_t q = 0; q < WEIGHT_GROUP / 8; q++, pairs += PAIR_BYTES / 4, quad += 2 * tile_rows * Tile8::QUAD) {
      SWARM_UNROLL
      for (int j = 0; j < N; j++) {
        const uint8_t* at = pairs + j / VECS * stride + j % VECS * 4 * LANES;
        if (j % VECS == 0) __builtin_prefetch(at + PREFETCH_BYTES);
        const U words = load_words(at);
        const WeightQuads first(numbers[words & 0x0f0f0f0fu]), second(numbers[words >> 4 & 0x0f0f0f0fu]);
        SWARM_UNROLL
        for (int r = 0; r < ROWS; r++) sums[r][j] = add_products(sums[r][j], first, quad + r * Tile8::QUAD);
        SWARM_UNROLL
        for (int r = 0; r < ROWS; r++)
          sums[r][j] = add_products(sums[r][j], second, quad + (tile_rows + r) * Tile8::QUAD);
      }
    }
    SWARM_UNROLL
    for (int j = 0; j < N; j++) {
      const V scale = Scales::at(scales + j / VECS * stride, groups, g, j % VECS);
      SWARM_UNROLL
      for (int r = 0; r < ROWS; r++) {
        const V part = rounded(__builtin_convertvector(sums[r][j], V) * scale);
        totals[r][j] += rounded(part * (V)word_at(steps + 4 * r));
      }
    }
  }
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++)
    SWARM_UNROLL
    for (int j = 0; j < N; j++) store(c + (r * N + j) * LANES, totals[r][j]);
}

}  // namespace SWARM_ISA
