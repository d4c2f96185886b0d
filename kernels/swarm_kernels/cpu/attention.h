// Attention of query rows against paged keys and values, 64 keys at a time, by online softmax. A row's arithmetic is
// the same whichever rows share its tile: chunks come in order, sums run over k, then over keys, in rising order, and
// keys a row does not see weigh exactly nothing.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace SWARM_ISA {

using swarm::AttendJob;
using swarm::CHUNK;
using swarm::PAGE;
using swarm::SoftmaxState;

// Rows of a register tile, and the blocks (pages of keys, 16 dimensions of values) it spans: few rows need many blocks
// to keep enough sums in flight.
#if defined(__AVX512F__)
constexpr int QUERY_TILE = 12;
constexpr int blocks_wide(int rows) { return rows > 6 ? 2 : 4; }
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int QUERY_TILE = 6;
constexpr int blocks_wide(int rows) { return rows > 3 ? 1 : 2; }
#else
constexpr int QUERY_TILE = 3;
constexpr int blocks_wide(int) { return 1; }
#endif
constexpr int CHUNK_PAGES = CHUNK / PAGE;

// q [dim][m], its columns i .. i + ROWS, x CHUNK_PAGES pages of keys [dim][16] -> scores [ROWS][64]. `ahead`: pages
// asked of memory meanwhile, or null: pages lie apart, and the hardware's own prefetch stops at the end of each.
template <int ROWS, typename T>
SWARM_INLINE void score(const float* q, int64_t m, int64_t dim, const T* const* pages, const T* const* ahead,
                        float* scores) {
  constexpr int PAGES_WIDE = blocks_wide(ROWS), N = PAGES_WIDE * VECS;
  for (int p = 0; p < CHUNK_PAGES; p += PAGES_WIDE) {
    V acc[ROWS][N];
    SWARM_UNROLL
    for (int r = 0; r < ROWS; r++)
      SWARM_UNROLL
      for (int j = 0; j < N; j++) acc[r][j] = zero();
    for (int64_t d = 0; d < dim; d++) {
      V keys[N];
      SWARM_UNROLL
      for (int j = 0; j < N; j++) keys[j] = load(pages[p + j / VECS] + d * PAGE + (j % VECS) * LANES);
      if (ahead && d % (64 / (PAGE * sizeof(T))) == 0) {
        SWARM_UNROLL
        for (int j = 0; j < PAGES_WIDE; j++) __builtin_prefetch(ahead[p + j] + d * PAGE);
      }
      SWARM_UNROLL
      for (int r = 0; r < ROWS; r++)
        SWARM_UNROLL
        for (int j = 0; j < N; j++) acc[r][j] += q[d * m + r] * keys[j];
    }
    SWARM_UNROLL
    for (int r = 0; r < ROWS; r++)
      SWARM_UNROLL
      for (int j = 0; j < N; j++) store(scores + r * CHUNK + p * PAGE + j * LANES, acc[r][j]);
  }
}

// mix [ROWS, WIDTH of dim] = mix * shrink + weights [ROWS][64] x values, over the keys in `seen`.
template <int ROWS, int WIDTH, typename T>
SWARM_INLINE void gather(const float* weights, const float* shrink, const T* const* pages, const T* const* ahead,
                         int64_t dim, int64_t d, uint64_t seen, float* mix) {
  constexpr int N = WIDTH / LANES;
  V acc[ROWS][N];
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++)
    SWARM_UNROLL
    for (int j = 0; j < N; j++) acc[r][j] = load(mix + r * dim + d + j * LANES) * shrink[r];
  for (; seen; seen &= seen - 1) {
    const int t = __builtin_ctzll(seen);
    const T* value = pages[t / PAGE] + (t % PAGE) * dim + d;
    if (ahead) {
      SWARM_UNROLL
      for (int j = 0; j < WIDTH; j += 64 / sizeof(T)) __builtin_prefetch(ahead[t / PAGE] + (t % PAGE) * dim + d + j);
    }
    V wide[N];
    SWARM_UNROLL
    for (int j = 0; j < N; j++) wide[j] = load(value + j * LANES);
    SWARM_UNROLL
    for (int r = 0; r < ROWS; r++)
      SWARM_UNROLL
      for (int j = 0; j < N; j++) acc[r][j] += weights[r * CHUNK + t] * wide[j];
  }
  SWARM_UNROLL
  for (int r = 0; r < ROWS; r++)
    SWARM_UNROLL
    for (int j = 0; j < N; j++) store(mix + r * dim + d + j * LANES, acc[r][j]);
}

// Lanes whose bit is clear become `hidden`.
SWARM_INLINE V hide(V values, uint64_t bits, float hidden) {
  I lane;
  SWARM_UNROLL
  for (int i = 0; i < LANES; i++) lane[i] = 1 << i;
  return (lane & (int32_t)(uint32_t)bits) != 0 ? values : splat(hidden);
}

// limit * tanh(score / limit), times log2(e).
SWARM_INLINE V cap(V scores, float limit) {
  V twice = scores * (2.0f * LOG2E / limit);
  twice = twice > 126.0f ? splat(126.0f) : twice;
  return LOG2E * (limit - (2.0f * limit) / (exp2(twice) + 1.0f));
}

// One row's 64 scores, in units of log2, -> weights in place; updates its maximum and sum, returns what its mix shrinks
// by.
inline float soften(float* scores, uint64_t bits, float softcap, float* running_max, float* running_sum) {
  constexpr int N = CHUNK / LANES;
  if (bits == 0) {
    for (int j = 0; j < N; j++) store(scores + j * LANES, zero());
    return 1.0f;
  }
  V s[N], top = splat(-INFINITY), total = zero();
  SWARM_UNROLL
  for (int j = 0; j < N; j++) {
    s[j] = load(scores + j * LANES);
    if (softcap != 0) s[j] = cap(s[j], softcap);
    if (~bits) s[j] = hide(s[j], bits >> (j * LANES), -INFINITY);
    top = max(s[j], top);
  }
  const float before = *running_max, peak = largest(top), now = peak > before ? peak : before;
  SWARM_UNROLL
  for (int j = 0; j < N; j++) {
    s[j] = exp2(s[j] - now);
    if (~bits) s[j] = hide(s[j], bits >> (j * LANES), 0.0f);
    store(scores + j * LANES, s[j]);
    total += s[j];
  }
  const float shrink = before == now ? 1.0f : before == -INFINITY ? 0.0f : exp2(splat(before - now))[0];
  *running_max = now;
  *running_sum = *running_sum * shrink + sum(total);
  return shrink;
}

// Which of a chunk's 64 keys batch row `row` sees.
SWARM_INLINE uint64_t visible(const AttendJob& job, int64_t row, int64_t chunk) {
  if (job.mask) return job.mask[row * job.words + chunk];
  const int64_t from = job.first[row] - chunk * CHUNK, to = job.past[row] - chunk * CHUNK;
  if (to <= 0 || from >= CHUNK) return 0;
  const uint64_t below = to >= CHUNK ? ~0ull : (1ull << to) - 1;
  return from <= 0 ? below : below & (~0ull << from);
}

template <int ROWS, typename T>
void attend_tile(const AttendJob& job, int64_t i, int64_t chunk, const T* const* k_pages, const T* const* v_pages,
                 const SoftmaxState& state) {
  uint64_t bits[ROWS], seen = 0;
  int64_t row = i / job.share, left = job.share - i % job.share;
  for (int r = 0; r < ROWS; r++, left--) {
    if (left == 0) row++, left = job.share;
    seen |= bits[r] = visible(job, row, chunk);
  }
  if (!seen) return;
  const T* const* k_ahead = i == 0 ? k_pages + CHUNK_PAGES : nullptr;  // the other rows find them in the cache
  const T* const* v_ahead = i == 0 ? v_pages + CHUNK_PAGES : nullptr;
  alignas(64) float weights[ROWS * CHUNK];
  float shrink[ROWS];
  score<ROWS>(job.q + i, job.m, job.dim, k_pages, k_ahead, weights);
  for (int r = 0; r < ROWS; r++)
    shrink[r] = soften(weights + r * CHUNK, bits[r], job.softcap, state.max + i + r, state.sum + i + r);
  float* mix = state.mix + i * job.dim;
  int64_t d = 0;
  constexpr int WIDE_DIMS = blocks_wide(ROWS) * BLOCK;
  for (; d + WIDE_DIMS <= job.dim; d += WIDE_DIMS)
    gather<ROWS, WIDE_DIMS>(weights, shrink, v_pages, v_ahead, job.dim, d, seen, mix);
  for (; d < job.dim; d += BLOCK) gather<ROWS, BLOCK>(weights, shrink, v_pages, v_ahead, job.dim, d, seen, mix);
}

template <typename T, int ROWS = QUERY_TILE>
SWARM_INLINE void attend_rows(const AttendJob& job, int64_t i, int64_t rows, int64_t chunk, const T* const* k_pages,
                              const T* const* v_pages, const SoftmaxState& state) {
  if (rows == ROWS) return attend_tile<ROWS>(job, i, chunk, k_pages, v_pages, state);
  if constexpr (ROWS > 1) attend_rows<T, ROWS - 1>(job, i, rows, chunk, k_pages, v_pages, state);
}

template <typename T>
void attend_of(const AttendJob& job, int64_t begin, int64_t end, const SoftmaxState& state) {
  for (int64_t chunk = begin; chunk < end; chunk++) {
    const T *k_pages[2 * CHUNK_PAGES], *v_pages[2 * CHUNK_PAGES];  // of this chunk and the next
    for (int64_t p = 0; p < 2 * CHUNK_PAGES; p++) {
      const int64_t at = chunk * CHUNK_PAGES + p;
      const int64_t page = job.table[at < job.table_pages ? at : job.table_pages - 1];  // past the end: never visible
      k_pages[p] = static_cast<const T*>(job.k) + page * job.page_stride;
      v_pages[p] = static_cast<const T*>(job.v) + page * job.page_stride;
    }
    for (int64_t i = 0; i < job.m; i += QUERY_TILE)
      attend_rows<T>(job, i, job.m - i < QUERY_TILE ? job.m - i : QUERY_TILE, chunk, k_pages, v_pages, state);
  }
}

// Runs the softmax of all rows over chunks [begin, end) of 64 keys, from an empty state.
inline void attend(const AttendJob& job, int64_t begin, int64_t end, const SoftmaxState& state) {
  for (int64_t i = 0; i < job.m; i++) state.max[i] = -INFINITY, state.sum[i] = 0.0f;
  std::memset(state.mix, 0, sizeof(float) * job.m * job.dim);
  job.bf16 ? attend_of<uint16_t>(job, begin, end, state) : attend_of<float>(job, begin, end, state);
}

// Adds the part's softmax to `into`: both are rescaled to the larger maximum (Ghidorah, section III-B).
inline void merge(int64_t m, int64_t dim, const SoftmaxState& into, const SoftmaxState& part) {
  for (int64_t i = 0; i < m; i++) {
    if (part.max[i] == -INFINITY) continue;
    const float peak = into.max[i] > part.max[i] ? into.max[i] : part.max[i];
    const float old = into.max[i] == -INFINITY ? 0.0f : exp2(splat(into.max[i] - peak))[0];
    const float add = exp2(splat(part.max[i] - peak))[0];
    into.max[i] = peak;
    into.sum[i] = into.sum[i] * old + part.sum[i] * add;
    for (int64_t d = 0; d < dim; d += LANES)
      store(into.mix + i * dim + d, load(into.mix + i * dim + d) * old + load(part.mix + i * dim + d) * add);
  }
}

}  // namespace SWARM_ISA
