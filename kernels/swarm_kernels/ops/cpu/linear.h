// y = x W^T for packed weights; the micro-kernels of narrower weights are in bf16.h, fp8.h, int8.h, int4.h and
// codebook.h. In fp32 a result is one chain of fused multiply-adds over k in ascending order, whatever its tile:
// results are batch-invariant.
#pragma once
#include <type_traits>

#include "bf16.h"
#include "codebook.h"
#include "fp8.h"
#include "int4.h"
#include "int8.h"
#include "kernels.h"
#include "simd.h"

namespace SWARM_ISA {

// Most rows of a tile, and the most for which two blocks side by side still fit the registers: rows x blocks x VECS
// sums, of 32 vector registers with AVX-512 and NEON, of 16 otherwise. Few rows need two blocks to keep enough sums in
// flight.
#if defined(__AVX512F__)
constexpr int ROW_TILE = 12, PAIR_ROWS = 12, BF16_ROW_TILE = 12, QUANTIZED_ROW_TILE = 12;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int ROW_TILE = 6, PAIR_ROWS = 3, BF16_ROW_TILE = 6, QUANTIZED_ROW_TILE = 8;
#else
constexpr int ROW_TILE = 3, PAIR_ROWS = 1, BF16_ROW_TILE = 3, QUANTIZED_ROW_TILE = 8;
#endif

inline int64_t row_tile(SwarmFormat weights) {
  switch (weights) {
    case SWARM_BF16:
    case SWARM_FP8: return BF16_ROW_TILE;
    case SWARM_INT8:
    case SWARM_INT4: return QUANTIZED_ROW_TILE;
    default: return ROW_TILE;
  }
}

// [ROWS] of a tile x [BLOCKS] weight blocks, `stride` elements apart -> c [ROWS][BLOCKS * 16].
template <int ROWS, int BLOCKS>
void micro_kernel(const float* x, int64_t tile_rows, int64_t in, const float* w, int64_t stride, float* c) {
  constexpr int N = BLOCKS * VECS;
  V acc[ROWS][N];
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++)
    SWARM_UNROLL
    for (int j = 0; j < N; j++) acc[r][j] = zero();
  for (int64_t k = 0; k < in; k++, w += BLOCK, x += tile_rows) {
    V wide[N];
    SWARM_UNROLL
    for (int j = 0; j < N; j++) {
      const float* at = w + (j / VECS) * stride + (j % VECS) * LANES;
      wide[j] = load(at);
      if (j % VECS == 0) __builtin_prefetch(at + PREFETCH_BYTES / 4);
    }
    SWARM_UNROLL
    for (int r = 0; r < ROWS; r++)
      SWARM_UNROLL
      for (int j = 0; j < N; j++) acc[r][j] += x[r] * wide[j];
  }
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++)
    SWARM_UNROLL
    for (int j = 0; j < N; j++) store(c + (r * N + j) * LANES, acc[r][j]);
}

template <typename W>
constexpr bool ROUNDS_INPUTS = std::is_same_v<W, uint16_t> || std::is_same_v<W, Fp8Codes>;
// The type of a tile's elements: other weights of 8 and 4 bits multiply what `quantize` wrote.
template <typename W>
using Input = std::conditional_t<std::is_same_v<W, float>, float,
                                 std::conditional_t<ROUNDS_INPUTS<W>, Bf16Input, char>>;
template <typename W>
using MicroKernel = void (*)(const Input<W>*, int64_t, int64_t, const W*, int64_t, float*);

// micro_kernel<rows, BLOCKS> for a number of rows, up to ROWS, known at run time.
template <typename W, int BLOCKS, int ROWS>
SWARM_INLINE MicroKernel<W> micro_kernel_for(int64_t rows) {
  if constexpr (ROWS == 1)
    return static_cast<MicroKernel<W>>(micro_kernel<1, BLOCKS>);
  else
    return rows == ROWS ? static_cast<MicroKernel<W>>(micro_kernel<ROWS, BLOCKS>)
                        : micro_kernel_for<W, BLOCKS, ROWS - 1>(rows);
}

// Adds the bias to [rows] of a block's sums, `ld` apart, and puts them into y by the job's epilogue (not GATE_UP).
inline void finish(const swarm::LinearJob& job, int64_t row, int64_t rows, int64_t block, const float* c, int64_t ld) {
  const int64_t column = block * BLOCK;
  const int64_t columns = job.out - column < BLOCK ? job.out - column : BLOCK;
  for (int64_t r = 0; r < rows; r++) {
    float* to = job.y + (row + r) * job.ldy + column;
    float edge[BLOCK] = {};  // the last block may reach over the end of y
    float* y = columns < BLOCK ? edge : to;
    if (columns < BLOCK) std::memcpy(edge, to, sizeof(float) * columns);
    SWARM_UNROLL
    for (int j = 0; j < BLOCK; j += LANES) {
      V value = load(c + r * ld + j);
      if (job.scale) value = rounded(value * load(job.scale + column + j));
      if (job.bias) value += load(job.bias + column + j);
      if (job.epilogue != swarm::LinearJob::STORE) value = load(y + j) + value;
      store(y + j, job.epilogue == swarm::LinearJob::ADD_BF16 ? rounded_to_bf16(value) : value);
    }
    if (columns < BLOCK) std::memcpy(to, edge, sizeof(float) * columns);
  }
}

template <SwarmActivation KIND>
SWARM_INLINE V activate(V gate) {
  if constexpr (KIND == SWARM_SILU) return gate * sigmoid(gate);
  if constexpr (KIND == SWARM_GELU_TANH) return gelu_tanh(gate);
  return 0.5f * gate * (1.0f + erf(gate * 0.70710678118654752f));
}

// `gate` and `up` are [rows] of 16 sums, `ld` apart.
template <SwarmActivation KIND>
inline void finish_gated_by(const swarm::LinearJob& job, int64_t row, int64_t rows, int64_t block, int64_t up_block,
                            const float* gate, const float* up, int64_t ld) {
  for (int64_t r = 0; r < rows; r++)
    for (int j = 0; j < BLOCK; j += LANES) {
      V g = load(gate + r * ld + j), u = load(up + r * ld + j);
      if (job.scale) {
        g = rounded(g * load(job.scale + block * BLOCK + j));
        u = rounded(u * load(job.scale + up_block * BLOCK + j));
      }
      if (job.bias) {
        g += load(job.bias + block * BLOCK + j);
        u += load(job.bias + up_block * BLOCK + j);
      }
      store(job.y + (row + r) * job.ldy + block * BLOCK + j, activate<KIND>(g) * u);
    }
}

inline void finish_gated(const swarm::LinearJob& job, int64_t row, int64_t rows, int64_t block, int64_t up_block,
                         const float* gate, const float* up, int64_t ld) {
  switch (job.activation) {
    case SWARM_SILU: return finish_gated_by<SWARM_SILU>(job, row, rows, block, up_block, gate, up, ld);
    case SWARM_GELU_TANH: return finish_gated_by<SWARM_GELU_TANH>(job, row, rows, block, up_block, gate, up, ld);
    case SWARM_GELU: return finish_gated_by<SWARM_GELU>(job, row, rows, block, up_block, gate, up, ld);
  }
}

// A tile of a job's rows.
template <typename W>
struct Rows {
  int64_t first, count;
  const Input<W>* x;
  Rows(const swarm::LinearJob& job, int64_t tile)
      : first(tile * job.tile_rows), count(job.rows - first < job.tile_rows ? job.rows - first : job.tile_rows),
        x(reinterpret_cast<const Input<W>*>(job.x + first * job.row_bytes)) {}
};

template <typename W>
constexpr bool IS_QUANTIZED = std::is_same_v<W, uint8_t> || std::is_same_v<W, Int4Block>;
// Codes have two sums for each result: whole numbers and fp32.
template <typename W>
constexpr bool HAS_TWO_SUMS = std::is_same_v<Input<W>, char> && !IS_QUANTIZED<W>;
template <typename W>
constexpr int MOST_ROWS = IS_QUANTIZED<W> ? QUANTIZED_ROW_TILE
                          : ROUNDS_INPUTS<W> ? BF16_ROW_TILE : ROW_TILE;

// Of a weight block, in elements.
template <typename W>
int64_t block_size(int64_t in) {
  if constexpr (std::is_same_v<W, Int4Block>)
    return in / WEIGHT_GROUP;
  else if constexpr (HAS_TWO_SUMS<W> || std::is_same_v<W, Fp8Codes>)
    return W::block_bytes(in);
  else
    return in * BLOCK;
}

// The blocks of an item are taken in pairs, half the item apart: two streams, each of which goes on where it is.
template <typename W>
void linear_of(const swarm::LinearJob& job, int64_t tile_begin, int64_t tile_end, int64_t begin, int64_t end) {
  const W* weight = static_cast<const W*>(job.weight);
  const int64_t size = block_size<W>(job.in);
  const bool gated = job.epilogue == swarm::LinearJob::GATE_UP;
  const int64_t apart = gated ? job.out / 2 / BLOCK : (end - begin) / 2;
  const int64_t middle = gated ? end : begin + apart;
  constexpr int PAIRED = HAS_TWO_SUMS<W> ? (PAIR_ROWS + 1) / 2 : PAIR_ROWS;
  float c[2 * MOST_ROWS<W> * BLOCK];
  for (int64_t b = begin; b < middle; b++)
    for (int64_t t = tile_begin; t < tile_end; t++) {
      const Rows<W> rows(job, t);
      const bool pairs = rows.count <= PAIRED;
      const int64_t ld = pairs ? 2 * BLOCK : BLOCK;
      float* second = pairs ? c + BLOCK : c + MOST_ROWS<W> * BLOCK;
      const W* w = weight + b * size;
      if (pairs) {
        micro_kernel_for<W, 2, PAIRED>(rows.count)(rows.x, job.tile_rows, job.in, w, apart * size, c);
      } else {
        const MicroKernel<W> one = micro_kernel_for<W, 1, MOST_ROWS<W>>(rows.count);
        one(rows.x, job.tile_rows, job.in, w, 0, c);
        one(rows.x, job.tile_rows, job.in, w + apart * size, 0, second);
      }
      if (gated) {
        finish_gated(job, rows.first, rows.count, b, b + apart, c, second, ld);
      } else {
        finish(job, rows.first, rows.count, b, c, ld);
        finish(job, rows.first, rows.count, b + apart, second, ld);
      }
    }
  for (int64_t b = middle + (gated ? 0 : apart); b < end; b++)
    for (int64_t t = tile_begin; t < tile_end; t++) {
      const Rows<W> rows(job, t);
      micro_kernel_for<W, 1, MOST_ROWS<W>>(rows.count)(rows.x, job.tile_rows, job.in, weight + b * size, 0, c);
      finish(job, rows.first, rows.count, b, c, BLOCK);
    }
}

template <int ROWS>
SWARM_INLINE void add_wide_rows(int64_t rows, const float* x, int64_t tile_rows, int64_t in, const float* w, float* c) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return add_wide_rows<ROWS - 1>(rows, x, tile_rows, in, w, c);
  }
  add_wide<ROWS>(x, tile_rows, in, w, c);
}

// linear_of<uint16_t> for whole tiles, see bf16.h.
inline void linear_widened(const swarm::LinearJob& job, int64_t tile_begin, int64_t tile_end, int64_t begin,
                           int64_t end) {
  const uint16_t* weight = static_cast<const uint16_t*>(job.weight);
  const bool gated = job.epilogue == swarm::LinearJob::GATE_UP;
  const int64_t apart = job.out / 2 / BLOCK, parts = gated ? 2 : 1;
  alignas(64) float wide[WIDE_INPUTS * BLOCK], c[2][WIDE_TILES][BF16_ROW_TILE * BLOCK];
  for (; tile_begin < tile_end; tile_begin += WIDE_TILES) {
    const int64_t tiles = tile_end - tile_begin < WIDE_TILES ? tile_end - tile_begin : WIDE_TILES;
    for (int64_t b = begin; b < end; b++) {
      std::memset(c, 0, sizeof c);
      for (int64_t part = 0; part < parts; part++)
        for (int64_t k = 0; k < job.in; k += WIDE_INPUTS) {
          const int64_t in = job.in - k < WIDE_INPUTS ? job.in - k : WIDE_INPUTS;
          widen_block(weight + ((b + part * apart) * job.in + k) * BLOCK, in, wide);
          for (int64_t t = 0; t < tiles; t++) {
            const Rows<uint16_t> rows(job, tile_begin + t);
            const float* x = reinterpret_cast<const float*>(rows.x) + k * job.tile_rows;
            add_wide_rows<BF16_ROW_TILE>(rows.count, x, job.tile_rows, in, wide, c[part][t]);
          }
        }
      for (int64_t t = 0; t < tiles; t++) {
        const Rows<uint16_t> rows(job, tile_begin + t);
        if (gated)
          finish_gated(job, rows.first, rows.count, b, b + apart, c[0][t], c[1][t], BLOCK);
        else
          finish(job, rows.first, rows.count, b, c[0][t], BLOCK);
      }
    }
  }
}

inline void quantize(SwarmFormat weights, const float* x, int64_t in, float scale, const float* norm, int64_t tile_rows,
                     int64_t row, char* tile) {
  if (weights == SWARM_INT4)
    Tile4::fill_row(x, in, scale, norm, tile_rows, row, tile);
  else
    Tile8::fill_row(x, in, scale, norm, tile_rows, row, tile);
}
inline int64_t row_bytes(SwarmFormat weights, int64_t in) {
  switch (weights) {
    case SWARM_FP32: return in * (int64_t)sizeof(float);
    case SWARM_BF16:
    case SWARM_FP8: return in / BF16_INPUTS * (int64_t)sizeof(Bf16Input);
    case SWARM_INT4: return (in + GROUP - 1) / GROUP * Tile4::GROUP_ROW_BYTES;
    default: return (in + GROUP - 1) / GROUP * Tile8::GROUP_ROW_BYTES;
  }
}

inline void linear(const swarm::LinearJob& job, int64_t tile_begin, int64_t tile_end, int64_t begin, int64_t end) {
  switch (job.format) {
    case SWARM_MXFP4: return linear_of<Mxfp4Codes>(job, tile_begin, tile_end, begin, end);
    case SWARM_IQ4_NL: return linear_of<Iq4NlCodes>(job, tile_begin, tile_end, begin, end);
    case SWARM_IQ4_XS: return linear_of<Iq4XsCodes>(job, tile_begin, tile_end, begin, end);
    case SWARM_NF4: return linear_of<Nf4Codes>(job, tile_begin, tile_end, begin, end);
    case SWARM_FP8: return linear_of<Fp8Codes>(job, tile_begin, tile_end, begin, end);
    case SWARM_INT4: return linear_of<Int4Block>(job, tile_begin, tile_end, begin, end);
    case SWARM_INT8: return linear_of<uint8_t>(job, tile_begin, tile_end, begin, end);
    case SWARM_BF16:
      if (WIDENS_FOR_TILES && job.rows >= BF16_ROW_TILE)
        return linear_widened(job, tile_begin, tile_end, begin, end);
      return linear_of<uint16_t>(job, tile_begin, tile_end, begin, end);
    case SWARM_FP32: return linear_of<float>(job, tile_begin, tile_end, begin, end);
  }
}

}  // namespace SWARM_ISA
