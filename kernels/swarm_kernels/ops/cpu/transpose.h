// Four rows of four numbers of 32 bits become columns.
#pragma once
#include "simd.h"

namespace SWARM_ISA {

struct Quads {
  Quad row[4];
};

// x [4 rows][4 columns], rows ldx apart -> its columns.
SWARM_INLINE Quads columns4(const float* x, int64_t ldx) {
  Quad a = load4(x), b = load4(x + ldx), c = load4(x + 2 * ldx), d = load4(x + 3 * ldx);
  Quad ab = interleave_low(a, b), cd = interleave_low(c, d), ab2 = interleave_high(a, b), cd2 = interleave_high(c, d);
  return {{join_low(ab, cd), join_high(ab, cd), join_low(ab2, cd2), join_high(ab2, cd2)}};
}

// x [4 rows][4 columns], rows ldx apart -> its transpose in y, rows ldy apart.
SWARM_INLINE void transpose4(const float* x, int64_t ldx, float* y, int64_t ldy) {
  const Quads columns = columns4(x, ldx);
  SWARM_UNROLL
  for (int i = 0; i < 4; i++) store4(y + i * ldy, columns.row[i]);
}

}  // namespace SWARM_ISA
