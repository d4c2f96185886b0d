// A layer's mixture of experts in one call: rows are grouped by expert, and only the chosen experts' weights are read.
#include <algorithm>

#include "op_schedule.h"

namespace swarm {
namespace {

constexpr int64_t MAX_PAIRS = 2048;  // of a row and one of its experts, in one pass: bounds the scratch memory
constexpr int64_t MIN_BLOCKS = 2, MAX_BLOCKS = 64, ITEMS_A_THREAD = 8;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The pairs of one expert, consecutive in the order of experts.
struct Group {
  int64_t expert, first, count;
};

// A tile of rows of one group.
struct Tile {
  int64_t group, first, count;  // pairs
};

// A run of a group's weight blocks.
struct Run {
  int64_t group, begin, end;
};

}  // namespace

// One linear layer of every expert in turn: pairs [pairs, in] -> y [pairs, out], both in the order of groups.
class ExpertsPass {
 public:
  ExpertsPass(const KernelTable& table, ThreadPool& pool, Scratch& scratch, const std::vector<Group>& groups,
              const SwarmLinear* weights)
      : table_(table), pool_(pool), scratch_(scratch), groups_(groups), weights_(weights) {}

  // row(pair, to): pointer to its inputs; may compute them into `to` [in].
  template <typename Row>
  void run(const Row& row, float* y) {
    prepare(y);
    std::vector<Tile> tiles;
    for (int64_t g = 0; g < (int64_t)groups_.size(); g++)
      for (int64_t first = 0; first < groups_[g].count; first += jobs_[g].tile_rows)
        tiles.push_back({g, first, std::min(jobs_[g].tile_rows, groups_[g].count - first)});
    const int64_t in = weights_[groups_[0].expert].in;
    float* buffers = scratch_.take(pool_.threads() * MAX_ROW_TILE * in);
    pool_.run((int64_t)tiles.size(), [&](int64_t item, int thread) {
      fill(tiles[item], row, buffers + thread * MAX_ROW_TILE * in);
    });
    const std::vector<Run> runs = split();
    pool_.run((int64_t)runs.size(), [&](int64_t item, int) {
      const Run& part = runs[runs.size() - 1 - item];  // the pool begins with the highest item: ascending addresses
      const LinearJob& job = jobs_[part.group];
      table_.linear(job, 0, ceil_div(job.rows, job.tile_rows), part.begin, part.end);
    });
  }

 private:
  void prepare(float* y) {
    for (const Group& group : groups_) {
      const SwarmLinear& w = weights_[group.expert];
      LinearJob job{};
      job.rows = group.count;
      job.tile_rows = ceil_div(group.count, ceil_div(group.count, table_.row_tile(w.format)));
      job.row_bytes = table_.row_bytes(w.format, w.in);
      const int64_t rows = ceil_div(group.count, job.tile_rows) * job.tile_rows;
      job.x = reinterpret_cast<char*>(scratch_.take(ceil_div(rows * job.row_bytes, sizeof(float))));
      job.in = padded_inputs(w.format, w.in), job.out = w.out;
      job.weight = w.weight, job.scale = w.scale, job.bias = w.bias, job.format = w.format;
      job.epilogue = LinearJob::STORE;
      job.y = y + group.first * w.out, job.ldy = w.out;
      jobs_.push_back(job);
    }
  }

  template <typename Row>
  void fill(const Tile& tile, const Row& row, float* buffer) {
    const LinearJob& job = jobs_[tile.group];
    const int64_t pair = groups_[tile.group].first + tile.first, in = weights_[groups_[tile.group].expert].in;
    char* to = const_cast<char*>(job.x) + tile.first * job.row_bytes;
    for (int64_t r = 0; r < tile.count; r++) {
      float* mine = buffer + r * in;
      const float* from = row(pair + r, mine);
      if (quantizes_inputs(job.format))
        table_.quantize(job.format, from, in, 1.0f, nullptr, job.tile_rows, r, to);
      else if (from != mine)
        std::copy(from, from + in, mine);
    }
    if (!quantizes_inputs(job.format))
      table_.fill_tile(rounds_inputs(job.format), buffer, in, tile.count, job.tile_rows, in, nullptr, nullptr,
                       reinterpret_cast<float*>(to));
  }

  // Long runs are read in streams; enough of them that all threads finish together.
  std::vector<Run> split() const {
    int64_t blocks = 0;
    for (const LinearJob& job : jobs_) blocks += ceil_div(job.out, 16);
    const int64_t width =
        std::clamp(blocks / (pool_.threads() * ITEMS_A_THREAD) / 2 * 2, MIN_BLOCKS, MAX_BLOCKS);
    std::vector<Run> runs;
    for (int64_t g = 0; g < (int64_t)jobs_.size(); g++) {
      const int64_t end = ceil_div(jobs_[g].out, 16);
      for (int64_t begin = 0; begin < end; begin += width) runs.push_back({g, begin, std::min(begin + width, end)});
    }
    return runs;
  }

  const KernelTable& table_;
  ThreadPool& pool_;
  Scratch& scratch_;
  const std::vector<Group>& groups_;
  const SwarmLinear* weights_;
  std::vector<LinearJob> jobs_;
};

void Engine::experts(const SwarmExperts& all, const float* x, const int64_t* index, const float* scores, int64_t rows,
                     int64_t chosen, float* y) {
  const int64_t most = std::max<int64_t>(1, MAX_PAIRS / chosen);
  for (int64_t begin = 0; begin < rows; begin += most) {
    const int64_t count = std::min(most, rows - begin);
    const Scratch::Mark mark = scratch_.mark();
    some_experts(all, x + begin * all.hidden, index + begin * chosen, scores + begin * chosen, count, chosen,
                 y + begin * all.hidden);
    scratch_.release(mark);
  }
}

void Engine::some_experts(const SwarmExperts& all, const float* x, const int64_t* index, const float* scores,
                          int64_t rows, int64_t chosen, float* y) {
  const int64_t pairs = rows * chosen, hidden = all.hidden, width = all.intermediate;
  const int64_t wide = all.gating.kind == SWARM_RELU_SQUARED ? width : 2 * width;
  std::vector<int64_t> ends(all.experts, 0), row_of(pairs), place(pairs);
  for (int64_t i = 0; i < pairs; i++) ends[index[i]]++;
  std::vector<Group> groups;
  int64_t first = 0;
  for (int64_t e = 0; e < all.experts; e++) {
    if (ends[e]) groups.push_back({e, first, ends[e]});
    first += ends[e];
    ends[e] = first - ends[e];  // from here on: where the expert's next pair goes
  }
  for (int64_t i = 0; i < pairs; i++) {
    place[i] = ends[index[i]]++;
    row_of[place[i]] = i / chosen;
  }
  float* inner = scratch_.take(pairs * wide);
  float* outer = scratch_.take(pairs * hidden);
  ExpertsPass(*table_, *pool_, scratch_, groups, all.first)
      .run([&](int64_t pair, float*) { return x + row_of[pair] * hidden; }, inner);
  const auto gated = [&](int64_t pair, float* to) {
    table_->gate_row(all.gating, inner + pair * wide, width, to);
    return to;
  };
  ExpertsPass(*table_, *pool_, scratch_, groups, all.second).run(gated, outer);
  sum_experts(outer, place.data(), scores, rows, chosen, hidden, y);
}

void Engine::sum_experts(const float* outputs, const int64_t* place, const float* scores, int64_t rows, int64_t chosen,
                         int64_t hidden, float* y) {
  pool_->run(rows, [&](int64_t row, int) {
    float* to = y + row * hidden;
    std::fill(to, to + hidden, 0.0f);
    for (int64_t pair = row * chosen; pair < (row + 1) * chosen; pair++) {  // in the order of the row's experts: no row
      const float score = scores[pair];                                     // depends on another
      const float* from = outputs + (place ? place[pair] : pair) * hidden;
      for (int64_t k = 0; k < hidden; k++) to[k] += score * from[k];
    }
  });
}

}  // namespace swarm
