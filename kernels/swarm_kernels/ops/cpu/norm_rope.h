// Work on single rows: norms, rotary embedding, filling a linear's tile, writing keys and values into KV blocks.
#pragma once
#include "bf16.h"
#include "kernels.h"
#include "simd.h"
#include "transpose.h"

namespace SWARM_ISA {

inline float sum_of_squares(const float* x, int64_t in) {
  V squares[2] = {zero(), zero()};
  int64_t k = 0;
  for (; k + 2 * LANES <= in; k += 2 * LANES) {
    V a = load(x + k), b = load(x + k + LANES);
    squares[0] += a * a;
    squares[1] += b * b;
  }
  float total = sum(squares[0] + squares[1]);
  for (; k < in; k++) total += x[k] * x[k];
  return total;
}

inline float inverse_rms(const float* x, int64_t in, float eps) {
  return 1.0f / std::sqrt(sum_of_squares(x, in) / (float)in + eps);
}

inline void scale_row(const float* x, int64_t in, float scale, const float* norm, float* y) {
  for (int64_t k = 0; k < in; k++) y[k] = x[k] * scale * norm[k];
}

inline void round_row(float* x, int64_t in) {
  int64_t k = 0;
  for (; k + LANES <= in; k += LANES) store(x + k, rounded_to_bf16(load(x + k)));
  for (; k < in; k++) {
    const uint32_t bits = (uint32_t)to_bf16(x[k]) << 16;
    std::memcpy(x + k, &bits, sizeof bits);
  }
}

// `norm` may be null.
inline void add_row(const float* x, int64_t in, float scale, const float* norm, bool bf16, float* y) {
  if (norm)
    for (int64_t k = 0; k < in; k++) y[k] += x[k] * scale * norm[k];
  else
    for (int64_t k = 0; k < in; k++) y[k] += x[k] * scale;
  if (bf16) round_row(y, in);
}

inline void fill_tile(bool bf16, const float* x, int64_t ldx, int64_t rows, int64_t tile_rows, int64_t in,
                      const float* scale, const float* norm, float* tile) {
  constexpr int64_t STEP = 64;  // columns at a time: their part of the tile stays in the first-level cache
  float ready[swarm::MAX_ROW_TILE * STEP];
  for (int64_t k0 = 0; k0 < in; k0 += STEP) {
    int64_t width = k0 + STEP < in ? STEP : in - k0;
    const float* from = x + k0;
    int64_t ld = ldx;
    if (norm) {
      for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < width; k++) ready[r * STEP + k] = from[r * ldx + k] * scale[r] * norm[k0 + k];
      from = ready, ld = STEP;
    }
    if (bf16) {
      for (int64_t r = 0; r < rows; r++) round_inputs(from + r * ld, width, ready + r * STEP);
      from = ready, ld = STEP, width /= BF16_INPUTS;
    }
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      int64_t k = 0;
      for (; k + 4 <= width; k += 4) transpose4(from + r * ld + k, ld, tile + k * tile_rows + r, tile_rows);
      for (; k < width; k++)
        for (int64_t i = r; i < r + 4; i++) tile[k * tile_rows + i] = from[i * ld + k];
    }
    for (; r < rows; r++)
      for (int64_t k = 0; k < width; k++) tile[k * tile_rows + r] = from[r * ld + k];
    tile += width * tile_rows;
  }
}

// Hugging Face's rotate_half: dimension d turns with d + rot / 2.
inline void rope(float* head, int64_t rot, const float* cos, const float* sin) {
  const int64_t half = rot / 2;
  for (int64_t d = 0; d < half; d++) {
    const float a = head[d], b = head[d + half];
    head[d] = a * cos[d] - b * sin[d];
    head[d + half] = b * cos[d + half] + a * sin[d + half];
  }
}

// One head's key and value to token `offset` of its KV block: k_block [dim][16], v_block [16][value_dim].
inline void write_kv(const float* k, const float* v, int64_t dim, int64_t value_dim, int64_t offset, bool bf16,
                     void* k_block, void* v_block) {
  if (bf16) {
    uint16_t* keys = static_cast<uint16_t*>(k_block) + offset;
    uint16_t* values = static_cast<uint16_t*>(v_block) + offset * value_dim;
    for (int64_t d = 0; d < dim; d++) keys[d * BLOCK] = to_bf16(k[d]);
    for (int64_t d = 0; d < value_dim; d++) values[d] = to_bf16(v[d]);
  } else {
    float* keys = static_cast<float*>(k_block) + offset;
    for (int64_t d = 0; d < dim; d++) keys[d * BLOCK] = k[d];
    if (value_dim) std::memcpy(static_cast<float*>(v_block) + offset * value_dim, v, value_dim * sizeof(float));
  }
}

}  // namespace SWARM_ISA
