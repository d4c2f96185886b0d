// Multi-head latent attention (DeepSeek V2) with absorbed projections: all query heads share one key, and its first
// numbers are the value too, so that they are stored once. Keys lie in the cache transposed; these panels of them are
// what `pack_panel` makes of values.
#pragma once
#include "kernels.h"
#include "qk_pv_tiles.h"
#include "transpose.h"

namespace SWARM_ISA {

// Lines of 16 tokens -> tokens, or pairs of them, of `width` dimensions each. `width`: a multiple of 4.
inline void transpose_block(const float* block, int64_t width, float* to) {
  for (int64_t token = 0; token < KV_BLOCK; token += 4)
    for (int64_t d = 0; d < width; d += 4)
      transpose4(block + d * KV_BLOCK + token, KV_BLOCK, to + token * width + d, width);
}

inline void transpose_block(const uint16_t* block, int64_t width, Bf16Input* to) {
  constexpr int64_t PAIRS = KV_BLOCK / 2;  // in a line: two tokens are a word
  const float* words = reinterpret_cast<const float*>(block);
  float* lines = reinterpret_cast<float*>(to);
  for (int64_t pair = 0; pair < PAIRS; pair += 4)
    for (int64_t d = 0; d < width; d += 4) {
      const Quads tokens = columns4(words + d * PAIRS + pair, PAIRS);
      SWARM_UNROLL
      for (int i = 0; i < 4; i++) {
        float* line = lines + (pair + i) * (2 / BF16_INPUTS) * width + d;
        typedef uint32_t Bits __attribute__((vector_size(16)));
        if constexpr (BF16_INPUTS == 2) {
          store4(line, tokens.row[i]);
        } else {
          store4(line, (Quad)((Bits)tokens.row[i] << 16));
          store4(line + width, (Quad)((Bits)tokens.row[i] & 0xffff0000u));
        }
      }
    }
}

// Dimensions [d, d + width) of a step's keys, as values, at `to`.
template <typename T>
auto pack_latent_values(const T* const* keys, KvBlockRange kv_blocks, int64_t d, int64_t width, float* to) {
  using Element = std::conditional_t<std::is_same_v<T, float>, float, Bf16Input>;
  Panel<Element> ready;
  ready.kv_blocks = kv_blocks, ready.ld = width, ready.prefetch_stride = width * sizeof(Element);
  for (int64_t p = kv_blocks.begin; p < kv_blocks.end; p++) {
    Element* block = reinterpret_cast<Element*>(to);
    ready.kv_block[p] = block;
    transpose_block(keys[p] + d * KV_BLOCK, width, block);
    to += KV_BLOCK * width / (std::is_same_v<Element, uint32_t> ? 2 : 1);
  }
  return ready;
}

}  // namespace SWARM_ISA
