#include "op_schedule.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace swarm {
namespace {

// An item of a linear: with few rows, a long run of weight blocks; with many, as many blocks as stay in the L2 cache
// while a group of row tiles uses them.
constexpr int64_t FEW_TILES = 2, TILES_A_GROUP = 8;
constexpr int64_t QUANTIZED_ROWS = 4;  // per item when quantizing rows: fewer cost more to schedule than to do
constexpr int64_t MIN_BLOCKS = 2, MAX_BLOCKS = 64, CACHED_BLOCKS = 8;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

void Scratch::Free::operator()(float* p) const { std::free(p); }

float* Scratch::take(int64_t count) {
  count = ceil_div(count, 16) * 16;  // cache lines
  while (current_ < chunks_.size() && used_ + count > chunks_[current_].size) current_++, used_ = 0;
  if (current_ == chunks_.size()) {
    const int64_t size = std::max<int64_t>(count, 1 << 18);
    void* memory = std::aligned_alloc(64, size * sizeof(float));
    if (!memory) throw std::bad_alloc();
    chunks_.push_back({std::unique_ptr<float[], Free>(static_cast<float*>(memory)), size});
  }
  float* taken = chunks_[current_].memory.get() + used_;
  used_ += count;
  return taken;
}

void Engine::prepare(const KernelTable& table, int threads) {
  table_ = &table;
  if (threads != pool_->requested_threads()) set_core_groups(threads, {});
  scratch_.reset();
}

void Engine::set_core_groups(int threads, const CoreGroups& units) {
  pool_ = std::make_unique<ThreadPool>(threads, units);
  slow_permille_ = units.slow_permille;
}

// The rows quantized and packed into tiles, for 8 and 4-bit weights.
const char* Engine::quantized_tiles(const SwarmLinear& weights, const float* x, int64_t rows, int64_t tile_rows,
                                       const Norm* norm) {
  const int64_t in = weights.in, row_bytes = table_->row_bytes(weights.format, in);
  char* tiles = reinterpret_cast<char*>(scratch_.take(ceil_div(rows, tile_rows) * tile_rows * row_bytes / 4));
  pool_->run(ceil_div(rows, QUANTIZED_ROWS), [&](int64_t item, int) {
    const int64_t begin = item * QUANTIZED_ROWS, end = std::min(rows, begin + QUANTIZED_ROWS);
    for (int64_t r = begin; r < end; r++) {
      const float* from = x + r * in;
      const float scale = norm ? table_->inverse_rms(from, in, norm->eps) : 1.0f;
      char* tile = tiles + r / tile_rows * tile_rows * row_bytes;
      table_->quantize(weights.format, from, in, scale, norm ? norm->weight : nullptr, tile_rows, r % tile_rows, tile);
    }
  });
  return tiles;
}

// The rows packed into a linear's tiles, with RMS norm if `norm` is given.
const char* Engine::packed_tiles(const SwarmLinear& weights, const float* x, int64_t rows, int64_t tile_rows,
                             const Norm* norm) {
  const bool bf16 = rounds_inputs(weights.format);
  if (rows == 1 && !norm && !bf16) return reinterpret_cast<const char*>(x);
  const int64_t in = weights.in, row_floats = table_->row_bytes(weights.format, in) / (int64_t)sizeof(float);
  float* tiles = scratch_.take(ceil_div(rows, tile_rows) * tile_rows * row_floats);
  pool_->run(ceil_div(rows, tile_rows), [&](int64_t tile, int) {
    const int64_t row = tile * tile_rows, count = std::min(tile_rows, rows - row);
    float scale[MAX_ROW_TILE];
    if (norm)
      for (int64_t r = 0; r < count; r++) scale[r] = table_->inverse_rms(x + (row + r) * in, in, norm->eps);
    table_->fill_tile(bf16, x + row * in, in, count, tile_rows, in, scale, norm ? norm->weight : nullptr,
                      tiles + row * row_floats);
  });
  return reinterpret_cast<const char*>(tiles);
}

// Where the items of a linear end, for blocks [begin, end) and the threads that compute them. With few rows they are
// long at first, to read memory in long streams, and short towards the end, so that all threads finish together; with
// many rows they are alike.
void Engine::add_column_ends(int64_t begin, int64_t end, int64_t threads, int64_t tiles) {
  if (begin == end) return;  // no slow group, and no threads of it
  const int64_t even = std::min(CACHED_BLOCKS, (end - begin) * ceil_div(tiles, TILES_A_GROUP) / (4 * threads));
  while (begin < end) {
    const int64_t width = tiles > FEW_TILES ? even : (end - begin) / (2 * threads);
    begin = std::min(end, begin + std::clamp(width / 2 * 2, MIN_BLOCKS, MAX_BLOCKS));
    ends_.push_back(begin);
  }
}

void Engine::gemm(const SwarmLinear& weights, const float* x, int64_t rows, const Norm* norm,
                  LinearJob::Epilogue epilogue, float* y, int64_t ldy, SwarmActivation activation) {
  if (rows == 0) return;
  const int64_t tile_rows = ceil_div(rows, ceil_div(rows, table_->row_tile(weights.format)));
  LinearJob job;
  job.x = quantizes_inputs(weights.format)
              ? quantized_tiles(weights, x, rows, tile_rows, norm)
              : packed_tiles(weights, x, rows, tile_rows, norm);
  job.row_bytes = table_->row_bytes(weights.format, weights.in);
  job.rows = rows, job.tile_rows = tile_rows, job.in = padded_inputs(weights.format, weights.in);
  job.weight = weights.weight, job.scale = weights.scale, job.bias = weights.bias, job.format = weights.format;
  job.out = weights.out, job.epilogue = epilogue, job.activation = activation, job.y = y, job.ldy = ldy;

  const int64_t tiles = ceil_div(rows, tile_rows);
  const int64_t blocks = ceil_div(weights.out, 16) / (epilogue == LinearJob::GATE_UP ? 2 : 1);
  const int64_t row_groups = ceil_div(tiles, TILES_A_GROUP);
  const int64_t slow_threads = pool_->slow_threads();
  const int64_t fast_blocks = slow_threads ? blocks - blocks * slow_permille_ / 1000 : blocks;
  ends_.clear();
  add_column_ends(0, fast_blocks, pool_->threads() - slow_threads, tiles);
  const int64_t fast_items = (int64_t)ends_.size() * row_groups;
  add_column_ends(fast_blocks, blocks, slow_threads, tiles);
  const int64_t items = (int64_t)ends_.size() * row_groups;
  pool_->run(items, items - fast_items, [&](int64_t item, int) {
    // Ascending addresses, large items first.
    item = item < fast_items ? fast_items - 1 - item : items - 1 - (item - fast_items);
    const int64_t column = item / row_groups, tile = item % row_groups * TILES_A_GROUP;
    table_->linear(job, tile, std::min(tile + TILES_A_GROUP, tiles), column ? ends_[column - 1] : 0, ends_[column]);
  });
}

void Engine::linear(const SwarmLinear& weights, const float* x, int64_t rows, float* y) {
  gemm(weights, x, rows, nullptr, LinearJob::STORE, y, weights.out);
}

void Engine::rms_norm(const float* x, int64_t rows, int64_t in, const float* weight, float eps, float* y) {
  for (int64_t r = 0; r < rows; r++, x += in, y += in)
    table_->scale_row(x, in, table_->inverse_rms(x, in, eps), weight, y);
}

}  // namespace swarm
