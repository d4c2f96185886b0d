// What an expert does between its two linear layers.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace SWARM_ISA {

template <typename Work>
SWARM_INLINE void by_vectors(const float* x, const float* up, int64_t width, float* y, const Work& work) {
  int64_t k = 0;
  for (; k + LANES <= width; k += LANES) store(y + k, work(load(x + k), load(up + k)));
  if (k == width) return;
  float rest[3][LANES] = {};  // padded: vectors of LANES whatever the width, so every element is rounded alike
  std::memcpy(rest[0], x + k, sizeof(float) * (width - k));
  std::memcpy(rest[1], up + k, sizeof(float) * (width - k));
  store(rest[2], work(load(rest[0]), load(rest[1])));
  std::memcpy(y + k, rest[2], sizeof(float) * (width - k));
}

// x [2 width], the gates and then what they multiply, or [width] where there are no gates -> y [width], which may be x.
inline void gate_row(const SwarmGating& how, const float* x, int64_t width, float* y) {
  switch (how.kind) {
    case SWARM_SWIGLU: {
      const V most = splat(how.limit), least = splat(-how.limit);
      return by_vectors(x, x + width, width, y, [&](V gate, V up) {
        gate = gate > most ? most : gate;
        up = up > most ? most : up;
        up = up < least ? least : up;
        return gate * sigmoid(gate * how.alpha) * (up + how.shift);
      });
    }
    case SWARM_GEGLU_TANH:
      return by_vectors(x, x + width, width, y, [](V gate, V up) { return gelu_tanh(gate) * up; });
    case SWARM_RELU_SQUARED:
      return by_vectors(x, x, width, y, [](V value, V) {
        value = value < 0.0f ? zero() : value;  // NaN stays NaN
        return value * value;
      });
  }
}

}  // namespace SWARM_ISA
