// Schedules the attention of a batch: query tiles, KV splits (Flash-Decoding), and their assignment to threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "op_schedule.h"

namespace swarm {
namespace {

constexpr int64_t MAX_QUERY_ROWS = 96;  // of a tile, unless one row has more: enough to amortize packing keys
constexpr int64_t MAX_SHARED_SPLITS = 4096;  // with two core groups: each split keeps its softmax state until merged
constexpr int64_t MIN_UNITS_PER_THREAD = 4;  // with fewer, splits are spread over threads
constexpr float LOG2_E = 1.44269504088896f;
constexpr int64_t FEW_ROWS = 4;  // loading their queries is faster than starting a parallel region

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t whole_cache_lines(int64_t floats) { return ceil_div(floats, 16) * 16; }

// Keys are processed in splits that are merged in order. The splits do not depend on the number of threads, so
// spreading them over threads, which pays when there are few rows, leaves results bit for bit the same. Splits grow
// with the context, from one step to eight: short contexts balance well, long ones need few merges.
int64_t first_step(int64_t split) { return split < 1 ? 0 : split < 5 ? 1 << (split - 1) : (split - 3) * 8; }

int64_t split_of_step(int64_t step) {
  if (step >= 8) return step / 8 + 3;
  return step >= 4 ? 3 : step >= 2 ? 2 : step;
}

// Consecutive rows of one sequence. Its splits: dense [first_split, dense_splits), then a sparse one for tree slots.
struct RowTile {
  int64_t row, rows, sequence, first_split, dense_splits, splits;
};

// One call to attend: the state shared by all work items.
struct Attention {
  const KernelTable& table;
  const SwarmCache& cache;
  const SwarmPlan& plan;
  const Engine::Heads& in;
  const SwarmScoring& scoring;
  float* out;
  std::vector<int64_t> first_key, end_key;  // [rows] visible range of committed keys
  std::vector<uint64_t> cut_mask;  // the tree mask where windows or chunks begin within trees, else empty
  std::vector<RowTile> tiles;
  int64_t queries_per_kv, value_dim, max_splits = 0;

  Attention(const KernelTable& table, const SwarmCache& cache, const SwarmPlan& plan, const Engine::Heads& in,
            const SwarmScoring& scoring, float* out)
      : table(table), cache(cache), plan(plan), in(in), scoring(scoring), out(out), first_key(plan.rows),
        end_key(plan.context_lens, plan.context_lens + plan.rows), queries_per_kv(in.heads / cache.kv_heads),
        value_dim(cache.latent ? cache.latent : cache.value_dim) {
    bool cuts_trees = false;
    for (int64_t r = 0; r < plan.rows; r++) {
      first_key[r] = first_visible(plan.positions[r]);
      cuts_trees |= first_key[r] > end_key[r];
    }
    if (cuts_trees && tree_splits()) cut_trees();
    const int64_t rows_per_tile = std::max<int64_t>(1, MAX_QUERY_ROWS / queries_per_kv);
    for (int64_t r = 0; r < plan.rows; r += tiles.back().rows) tiles.push_back(tile_at(r, rows_per_tile));
  }

  int64_t first_visible(int64_t position) const {
    if (scoring.window > 0) return std::max<int64_t>(0, position - scoring.window + 1);
    return scoring.chunk > 0 ? position - position % scoring.chunk : 0;
  }

  // Clears the bits of tree slots before the first visible position of their row.
  void cut_trees() {
    cut_mask.assign(plan.tree_mask, plan.tree_mask + plan.rows * plan.mask_words);
    const int64_t slots = plan.max_tree_blocks * KV_BLOCK;
    for (int64_t r = 0; r < plan.rows; r++) {
      const int32_t* positions = plan.tree_positions + plan.sequence_index[r] * slots;
      for (int64_t slot = 0; slot < std::min(slots, plan.mask_words * 64); slot++)
        if (positions[slot] < first_key[r]) cut_mask[r * plan.mask_words + slot / 64] &= ~(1ull << slot % 64);
    }
  }

  RowTile tile_at(int64_t row, int64_t most) {
    RowTile tile{row, 0, plan.sequence_index[row], INT64_MAX, 0, 0};
    for (int64_t r = row; r < plan.rows && tile.rows < most && plan.sequence_index[r] == tile.sequence;
         r++, tile.rows++) {
      tile.first_split = std::min(tile.first_split, split_of_step(first_key[r] / STEP_KEYS));
      if (end_key[r] > 0)
        tile.dense_splits = std::max(tile.dense_splits, split_of_step((end_key[r] - 1) / STEP_KEYS) + 1);
    }
    tile.first_split = std::min(tile.first_split, tile.dense_splits);
    tile.splits = tile.dense_splits - tile.first_split + tree_splits();
    max_splits = std::max(max_splits, tile.splits);
    return tile;
  }

  int64_t units() const { return (int64_t)tiles.size() * cache.kv_heads; }
  int64_t tree_splits() const { return plan.mask_words > 0 && plan.max_tree_blocks > 0 ? 1 : 0; }
  int64_t query_rows() const {
    return std::min(std::max<int64_t>(MAX_QUERY_ROWS / queries_per_kv, 1), plan.rows) * queries_per_kv;
  }
  int64_t state_size() const { return whole_cache_lines(query_rows() * (value_dim + 2)); }
  int64_t query_size() const { return whole_cache_lines(query_rows() * cache.dim); }
  // Also large enough to stage a tile's queries.
  int64_t workspace() const {
    return std::max(query_size(), whole_cache_lines(table.attend_workspace(query_rows(), cache.dim)));
  }
  SoftmaxState state_in(float* memory) const {
    return {memory + query_rows() * value_dim, memory + query_rows() * (value_dim + 1), memory};
  }

  void load_queries(const RowTile& tile, int64_t group, float* workspace, float* q) const {
    const int64_t m = tile.rows * queries_per_kv, dim = cache.dim, width = table.query_tile(m, cache.bf16 != 0);
    const float factor = scoring.scale * (scoring.softcap == 0.0f ? LOG2_E : 1.0f);  // the kernels use exp2
    for (int64_t i = 0; i < m; i++) {
      const float* from =
          in.q + (tile.row + i / queries_per_kv) * in.ldq + (group * queries_per_kv + i % queries_per_kv) * dim;
      for (int64_t d = 0; d < dim; d++) workspace[i * dim + d] = from[d] * factor;
    }
    for (int64_t i = 0; i < m; i += width) {
      const int64_t rows = std::min(width, m - i);
      table.fill_tile(cache.bf16 != 0, workspace + i * dim, dim, rows, rows, dim, nullptr, nullptr, q + i * dim);
    }
  }

  // `alone`: the thread does not continue with the next split, so nothing beyond this one is prefetched.
  void run_split(const RowTile& tile, int64_t group, int64_t split, bool alone, const float* q, float* workspace,
                 const SoftmaxState& state) const {
    const int64_t kv_block_size = cache.kv_heads * cache.dim * KV_BLOCK, head = group * cache.dim * KV_BLOCK;
    const int64_t bytes = head * (cache.bf16 ? 2 : 4), m = tile.rows * queries_per_kv;
    const void* values = cache.latent ? cache.k : cache.v;  // else of the keys' size
    AttendJob job{q, m, table.query_tile(m, cache.bf16 != 0), queries_per_kv, cache.dim, value_dim,
                  static_cast<const char*>(cache.k) + bytes, static_cast<const char*>(values) + bytes, kv_block_size,
                  cache.bf16 != 0, scoring.softcap, plan.block_tables + tile.sequence * plan.max_blocks, plan.max_blocks,
                  first_key.data() + tile.row, end_key.data() + tile.row, nullptr, plan.mask_words, plan.mask_words,
                  workspace};
    const int64_t dense = tile.first_split + split;
    if (dense < tile.dense_splits) {
      if (scoring.chosen) job.chosen = scoring.chosen + tile.row * scoring.chosen_words;
      job.chosen_words = scoring.chosen_words;
      job.prefetch_end = first_step(alone ? dense + 1 : tile.dense_splits) * STEP_WORDS;
      table.attend(job, first_step(dense) * STEP_WORDS, first_step(dense + 1) * STEP_WORDS, state);
    } else {
      job.block_table = plan.tree_block_tables + tile.sequence * plan.max_tree_blocks;
      job.block_table_len = plan.max_tree_blocks;
      job.mask = (cut_mask.empty() ? plan.tree_mask : cut_mask.data()) + tile.row * plan.mask_words;
      table.attend(job, 0, plan.mask_words, state);
    }
  }

  void finish(const RowTile& tile, int64_t group, const SoftmaxState& state) const {
    for (int64_t i = 0; i < tile.rows * queries_per_kv; i++) {
      const int64_t head = group * queries_per_kv + i % queries_per_kv;
      float sum = state.sum[i];
      if (scoring.sinks && sum != 0.0f) sum += std::exp2(scoring.sinks[head] * LOG2_E - state.max[i]);
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      float* to = out + ((tile.row + i / queries_per_kv) * in.heads + head) * value_dim;
      for (int64_t d = 0; d < value_dim; d++) to[d] = state.weighted[i * value_dim + d] * inverse;
    }
  }
};

// One item per tile and head, its splits in sequence; the tiles of a head are adjacent, so its keys stay in the L2
// cache.
void attend_by_tile(const Attention& a, ThreadPool& pool, Scratch& scratch) {
  const int64_t size = a.workspace() + a.query_size() + 2 * a.state_size();
  float* memory = scratch.take(size * pool.threads());
  pool.run(a.units(), [&](int64_t item, int thread) {
    const RowTile& tile = a.tiles[item % a.tiles.size()];
    const int64_t group = item / a.tiles.size();
    float *workspace = memory + thread * size, *q = workspace + a.workspace(), *states = q + a.query_size();
    const SoftmaxState whole = a.state_in(states), part = a.state_in(states + a.state_size());
    a.load_queries(tile, group, workspace, q);
    std::fill_n(whole.sum, tile.rows * a.queries_per_kv, 0.0f);
    std::fill_n(whole.weighted, tile.rows * a.queries_per_kv * a.value_dim, 0.0f);
    for (int64_t split = 0; split < tile.splits; split++) {
      a.run_split(tile, group, split, false, q, workspace, split ? part : whole);
      if (split) a.table.merge(tile.rows * a.queries_per_kv, a.value_dim, whole, part);
    }
    a.finish(tile, group, whole);
  });
}

// One item per split, the longest first; the thread that finishes the last split of a tile and head merges them in
// order. With two core groups the slow one computes the splits of tree slots (Ghidorah, section III-B).
void attend_by_split(const Attention& a, ThreadPool& pool, Scratch& scratch) {
  const int64_t units = a.units(), size = a.state_size();
  float* states = scratch.take(units * a.max_splits * size);
  float* queries = scratch.take(a.query_size() * units);
  float* workspaces = scratch.take(a.workspace() * pool.threads());
  const auto tile_of = [&](int64_t unit) -> const RowTile& { return a.tiles[unit / a.cache.kv_heads]; };
  const auto load = [&](int64_t unit, int thread) {
    a.load_queries(tile_of(unit), unit % a.cache.kv_heads, workspaces + thread * a.workspace(),
                   queries + unit * a.query_size());
  };
  if (a.plan.rows > FEW_ROWS)
    pool.run(units, load);
  else
    for (int64_t unit = 0; unit < units; unit++) load(unit, 0);
  std::vector<std::atomic<int64_t>> done(units);
  // The last split of a unit is the shortest: it runs first if the slow group computes it, else at the end.
  const bool has_slow_group = pool.has_slow_group() && a.tree_splits();
  pool.run(units * a.max_splits, has_slow_group ? units : 0, [&](int64_t item, int thread) {
    const int64_t unit = item % units, group = unit % a.cache.kv_heads, turn = item / units;
    const RowTile& tile = tile_of(unit);
    const int64_t last = has_slow_group ? a.max_splits - 1 : 0;
    if (turn != last && turn - !has_slow_group >= tile.splits - 1) return;
    const int64_t split = turn == last ? tile.splits - 1 : turn - !has_slow_group;
    float* first = states + unit * a.max_splits * size;
    a.run_split(tile, group, split, true, queries + unit * a.query_size(), workspaces + thread * a.workspace(),
                a.state_in(first + split * size));
    if (done[unit].fetch_add(1) + 1 < tile.splits) return;
    for (int64_t b = 1; b < tile.splits; b++)
      a.table.merge(tile.rows * a.queries_per_kv, a.value_dim, a.state_in(first), a.state_in(first + b * size));
    a.finish(tile, group, a.state_in(first));
  });
}

}  // namespace

void Engine::attend(const SwarmCache& cache, const SwarmPlan& plan, const Heads& in, const SwarmScoring& scoring,
                    float* out) {
  const Attention a(*table_, cache, plan, in, scoring, out);
  bool has_empty_tile = false;
  for (const RowTile& tile : a.tiles) has_empty_tile |= tile.splits == 0;
  const bool has_slow_group =
      pool_->has_slow_group() && a.tree_splits() && a.units() * a.max_splits <= MAX_SHARED_SPLITS;
  const bool few = a.units() < MIN_UNITS_PER_THREAD * pool_->threads() && pool_->threads() > 1;
  if ((few || has_slow_group) && a.max_splits > 1 && !has_empty_tile)
    attend_by_split(a, *pool_, scratch_);
  else
    attend_by_tile(a, *pool_, scratch_);
}

}  // namespace swarm
