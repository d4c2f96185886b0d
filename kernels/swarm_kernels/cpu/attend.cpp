// Attention of a batch: which rows share a tile, which keys make a block, which piece goes to which thread.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "engine.h"

namespace swarm {
namespace {

constexpr int64_t MAX_QUERY_ROWS = 48;  // of a tile: queries and mixes share the first-level cache with a chunk of keys
// Keys are softmaxed in blocks of this many chunks, merged in order. Always, so that spreading the blocks over threads,
// which pays when there are few rows, changes no bit of the result.
constexpr int64_t BLOCK_CHUNKS = 2;
constexpr int64_t MOST_DIVIDED = 4096;  // blocks that two units share: each has a softmax in memory until it is merged

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Consecutive rows of one session. Its blocks: dense [first_block, dense_blocks), then one sparse if there are tree
// slots.
struct RowTile {
  int64_t row, rows, session, first_block, dense_blocks, blocks;
};

// One call: what all items share.
struct Attention {
  const KernelTable& table;
  const SwarmCache& cache;
  const SwarmPlan& plan;
  const Engine::Heads& in;
  float scale, softcap;
  float* out;
  std::vector<int64_t> first, past;  // [rows] visible range of committed keys
  std::vector<RowTile> tiles;
  int64_t share, most_blocks = 0;

  Attention(const KernelTable& table, const SwarmCache& cache, const SwarmPlan& plan, const Engine::Heads& in,
            float scale, int64_t window, float softcap, float* out)
      : table(table), cache(cache), plan(plan), in(in), scale(scale), softcap(softcap), out(out), first(plan.rows),
        past(plan.past, plan.past + plan.rows), share(in.heads / cache.groups) {
    for (int64_t r = 0; r < plan.rows; r++)
      first[r] = window > 0 ? std::max<int64_t>(0, plan.positions[r] - window + 1) : 0;
    const int64_t rows_a_tile = std::max<int64_t>(1, MAX_QUERY_ROWS / share);
    for (int64_t r = 0; r < plan.rows; r += tiles.back().rows) tiles.push_back(tile_at(r, rows_a_tile));
  }

  RowTile tile_at(int64_t row, int64_t most) {
    RowTile tile{row, 0, plan.session[row], INT64_MAX, 0, 0};
    for (int64_t r = row; r < plan.rows && tile.rows < most && plan.session[r] == tile.session; r++, tile.rows++) {
      tile.first_block = std::min(tile.first_block, first[r] / (BLOCK_CHUNKS * CHUNK));
      tile.dense_blocks = std::max(tile.dense_blocks, ceil_div(past[r], BLOCK_CHUNKS * CHUNK));
    }
    tile.first_block = std::min(tile.first_block, tile.dense_blocks);
    tile.blocks = tile.dense_blocks - tile.first_block + sparse_blocks();
    most_blocks = std::max(most_blocks, tile.blocks);
    return tile;
  }

  int64_t sparse_blocks() const { return plan.words > 0 && plan.max_tree_pages > 0 ? 1 : 0; }
  int64_t query_rows() const { return std::min(std::max<int64_t>(MAX_QUERY_ROWS / share, 1), plan.rows) * share; }
  int64_t state_size() const { return query_rows() * (cache.dim + 2); }
  int64_t query_size() const { return query_rows() * cache.dim; }
  SoftmaxState state_in(float* memory) const {
    return {memory, memory + query_rows(), memory + 2 * query_rows()};
  }

  void load_queries(const RowTile& tile, int64_t group, float* q) const {
    const int64_t m = tile.rows * share;
    const float factor = softcap == 0.0f ? scale * 1.44269504088896f : scale;  // the kernels' exponentials are of 2
    for (int64_t i = 0; i < m; i++) {
      const float* from = in.q + (tile.row + i / share) * in.ldq + (group * share + i % share) * cache.dim;
      for (int64_t d = 0; d < cache.dim; d++) q[d * m + i] = from[d] * factor;
    }
  }

  void run_block(const RowTile& tile, int64_t group, int64_t block, const float* q, const SoftmaxState& state) const {
    const int64_t page = cache.groups * cache.dim * PAGE, head = group * cache.dim * PAGE;
    const int64_t bytes = head * (cache.bf16 ? 2 : 4);
    AttendJob job{q, tile.rows * share, share, cache.dim, static_cast<const char*>(cache.k) + bytes,
                  static_cast<const char*>(cache.v) + bytes, page, cache.bf16 != 0, softcap,
                  plan.pages + tile.session * plan.max_pages, plan.max_pages, first.data() + tile.row,
                  past.data() + tile.row, nullptr, plan.words};
    const int64_t dense = tile.first_block + block;
    if (dense < tile.dense_blocks) {
      table.attend(job, dense * BLOCK_CHUNKS, (dense + 1) * BLOCK_CHUNKS, state);
    } else {
      job.table = plan.tree_pages + tile.session * plan.max_tree_pages;
      job.table_pages = plan.max_tree_pages;
      job.mask = plan.tree_mask + tile.row * plan.words;
      table.attend(job, 0, plan.words, state);
    }
  }

  void finish(const RowTile& tile, int64_t group, const SoftmaxState& state) const {
    for (int64_t i = 0; i < tile.rows * share; i++) {
      const float inverse = state.sum[i] == 0.0f ? 0.0f : 1.0f / state.sum[i];
      const int64_t head = group * share + i % share;
      float* to = out + ((tile.row + i / share) * in.heads + head) * cache.dim;
      for (int64_t d = 0; d < cache.dim; d++) to[d] = state.mix[i * cache.dim + d] * inverse;
    }
  }
};

// A tile and a head an item, its blocks one after the other; the tiles of a head follow each other, so that its keys
// stay in the second-level cache.
void attend_whole(const Attention& a, Pool& pool, Scratch& scratch) {
  const int64_t size = a.query_size() + 2 * a.state_size();
  float* memory = scratch.take(size * pool.threads());
  pool.run((int64_t)a.tiles.size() * a.cache.groups, [&](int64_t item, int thread) {
    const RowTile& tile = a.tiles[item % a.tiles.size()];
    const int64_t group = item / a.tiles.size();
    float* q = memory + thread * size;
    const SoftmaxState whole = a.state_in(q + a.query_size());
    const SoftmaxState part = a.state_in(q + a.query_size() + a.state_size());
    a.load_queries(tile, group, q);
    std::fill_n(whole.sum, tile.rows * a.share, 0.0f);
    std::fill_n(whole.mix, tile.rows * a.share * a.cache.dim, 0.0f);
    for (int64_t block = 0; block < tile.blocks; block++) {
      a.run_block(tile, group, block, q, block ? part : whole);
      if (block) a.table.merge(tile.rows * a.share, a.cache.dim, whole, part);
    }
    a.finish(tile, group, whole);
  });
}

// A block an item; whoever finishes the last block of a tile and head merges them all, in order. In a divided pool the
// blocks of tree slots, the last ones, are the narrow unit's (Ghidorah, section III-B).
void attend_split(const Attention& a, Pool& pool, Scratch& scratch) {
  const int64_t units = (int64_t)a.tiles.size() * a.cache.groups, size = a.state_size();
  float* states = scratch.take(units * a.most_blocks * size);
  float* queries = scratch.take(a.query_size() * pool.threads());
  std::vector<std::atomic<int64_t>> done(units);
  std::vector<int64_t> loaded(pool.threads(), -1);  // whose queries each thread has; items of a unit follow each other
  const bool divided = pool.divided() && a.sparse_blocks();
  const int64_t dense = divided ? a.most_blocks - 1 : a.most_blocks;  // at most, of a unit
  pool.run(units * a.most_blocks, divided ? units : 0, [&](int64_t item, int thread) {
    const bool sparse = item >= units * dense;
    const int64_t unit = sparse ? item - units * dense : item / dense, group = unit % a.cache.groups;
    const RowTile& tile = a.tiles[unit / a.cache.groups];
    const int64_t block = sparse ? tile.blocks - 1 : item % dense;
    if (block >= (divided && !sparse ? tile.blocks - 1 : tile.blocks)) return;
    float *q = queries + thread * a.query_size(), *first = states + unit * a.most_blocks * size;
    if (loaded[thread] != unit) a.load_queries(tile, group, q);
    loaded[thread] = unit;
    a.run_block(tile, group, block, q, a.state_in(first + block * size));
    if (done[unit].fetch_add(1) + 1 < tile.blocks) return;
    for (int64_t b = 1; b < tile.blocks; b++)
      a.table.merge(tile.rows * a.share, a.cache.dim, a.state_in(first), a.state_in(first + b * size));
    a.finish(tile, group, a.state_in(first));
  });
}

}  // namespace

void Engine::attend(const SwarmCache& cache, const SwarmPlan& plan, const Heads& in, float scale, int64_t window,
                    float softcap, float* out) {
  const Attention a(*table_, cache, plan, in, scale, window, softcap, out);
  const int64_t units = (int64_t)a.tiles.size() * cache.groups;
  bool sees_nothing = false;
  for (const RowTile& tile : a.tiles) sees_nothing |= tile.blocks == 0;
  const bool divided = pool_->divided() && a.sparse_blocks() && units * a.most_blocks <= MOST_DIVIDED;
  const bool few = units < 4 * pool_->threads() && pool_->threads() > 1;
  if ((few || divided) && a.most_blocks > 1 && !sees_nothing)
    attend_split(a, *pool_, scratch_);
  else
    attend_whole(a, *pool_, scratch_);
}

}  // namespace swarm
