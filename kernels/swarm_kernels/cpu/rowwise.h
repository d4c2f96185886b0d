// Work on single rows: norms, rotary embedding, filling a linear's tile, writing keys and values into pages.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace SWARM_ISA {

inline float inverse_rms(const float* x, int64_t in, float eps) {
  V squares[2] = {zero(), zero()};
  int64_t k = 0;
  for (; k + 2 * LANES <= in; k += 2 * LANES) {
    V a = load(x + k), b = load(x + k + LANES);
    squares[0] += a * a;
    squares[1] += b * b;
  }
  float total = sum(squares[0] + squares[1]);
  for (; k < in; k++) total += x[k] * x[k];
  return 1.0f / std::sqrt(total / (float)in + eps);
}

inline void scale_row(const float* x, int64_t in, float scale, const float* norm, float* y) {
  for (int64_t k = 0; k < in; k++) y[k] = x[k] * scale * norm[k];
}

inline void fill_tile(const float* x, int64_t ldx, int64_t rows, int64_t tile_rows, int64_t in, const float* scale,
                      const float* norm, float* tile) {
  constexpr int64_t STEP = 16;  // of k: a cache line of each row, while the tile's lines stay near
  for (int64_t k0 = 0; k0 < in; k0 += STEP) {
    const int64_t k1 = k0 + STEP < in ? k0 + STEP : in;
    for (int64_t r = 0; r < rows; r++) {
      const float* from = x + r * ldx;
      if (norm)
        for (int64_t k = k0; k < k1; k++) tile[k * tile_rows + r] = from[k] * scale[r] * norm[k];
      else
        for (int64_t k = k0; k < k1; k++) tile[k * tile_rows + r] = from[k];
    }
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

// One head's key and value to token `offset` of its page: k_page [dim][16], v_page [16][dim].
inline void write_kv(const float* k, const float* v, int64_t dim, int64_t offset, bool bf16, void* k_page, void* v_page) {
  if (bf16) {
    uint16_t* keys = static_cast<uint16_t*>(k_page) + offset;
    uint16_t* values = static_cast<uint16_t*>(v_page) + offset * dim;
    for (int64_t d = 0; d < dim; d++) keys[d * BLOCK] = to_bf16(k[d]);
    for (int64_t d = 0; d < dim; d++) values[d] = to_bf16(v[d]);
  } else {
    float* keys = static_cast<float*>(k_page) + offset;
    for (int64_t d = 0; d < dim; d++) keys[d * BLOCK] = k[d];
    std::memcpy(static_cast<float*>(v_page) + offset * dim, v, dim * sizeof(float));
  }
}

}  // namespace SWARM_ISA
