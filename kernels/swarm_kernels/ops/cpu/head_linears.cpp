// A linear layer of its own for each attention head: the absorbed projections of multi-head latent attention.
#include <algorithm>

#include "op_schedule.h"

namespace swarm {
namespace {

constexpr int64_t TILES_A_GROUP = 8;  // row tiles that use a head's weights before the next ones do

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

// One item per head: its weights stay in the L2 cache while all rows use them.
void Engine::head_linears(const SwarmLinear& weights, int64_t heads, const HeadRows<const float>& x, int64_t rows,
                          const HeadRows<float>& y) {
  if (rows == 0) return;
  const int64_t in = weights.in, out = weights.out / heads, blocks = out / 16;
  const int64_t tile_rows = ceil_div(rows, ceil_div(rows, table_->row_tile(weights.format)));
  const int64_t tiles = ceil_div(rows, tile_rows), row_bytes = table_->row_bytes(weights.format, in);
  const int64_t size = ceil_div(tiles * tile_rows * row_bytes, sizeof(float));
  float* memory = scratch_.take(size * pool_->threads());
  pool_->run(heads, [&](int64_t head, int thread) {
    float* packed = memory + thread * size;
    for (int64_t row = 0; row < rows; row += tile_rows)
      table_->fill_tile(rounds_inputs(weights.format), x.first + head * x.head_stride + row * x.row_stride,
                        x.row_stride, std::min(tile_rows, rows - row), tile_rows, in, nullptr, nullptr,
                        packed + row * row_bytes / (int64_t)sizeof(float));
    LinearJob job{};
    job.x = reinterpret_cast<const char*>(packed), job.row_bytes = row_bytes;
    job.rows = rows, job.tile_rows = tile_rows, job.in = in;
    job.weight = weights.weight, job.format = weights.format, job.out = weights.out;
    job.epilogue = LinearJob::STORE;
    job.y = y.first + head * (y.head_stride - out), job.ldy = y.row_stride;  // columns count over all heads
    for (int64_t tile = 0; tile < tiles; tile += TILES_A_GROUP)
      table_->linear(job, tile, std::min(tile + TILES_A_GROUP, tiles), head * blocks, (head + 1) * blocks);
  });
}

}  // namespace swarm
