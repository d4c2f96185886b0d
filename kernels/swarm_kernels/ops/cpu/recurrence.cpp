// Layers with a state: rows of runs, trees and sessions in one call. Each row continues the state that its parent left;
// states live in scratch memory while a later row needs them, and leave it only where they are to be kept.
#include <algorithm>

#include "op_schedule.h"

namespace swarm {
namespace {

constexpr int64_t CHANNELS_AN_ITEM = 1024;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Finds the inputs before a row: those of its ancestors, then what a state holds, [starts][taps - 1][channels].
struct Inputs {
  const SwarmStateRows& rows;
  const SwarmConvolution& how;
  const float *x, *windows;
  int64_t x_row;

  // -> found [taps], the row's own last.
  void before(int64_t row, const float** found) const {
    int64_t at = row, window = how.taps - 1;
    for (int64_t t = how.taps; t-- > 0;) {
      if (at >= 0) {
        found[t] = x + at * x_row;
        at = rows.parent[at];
      } else {
        found[t] = windows + ((-1 - at) * (how.taps - 1) + --window) * how.channels;
      }
    }
  }
};

// Slots of states for a run through all rows.
class Slots {
 public:
  int32_t take() {
    if (free_.empty()) return count_++;
    const int32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  void give_back(int32_t slot) { free_.push_back(slot); }
  int64_t count() const { return count_; }

 private:
  std::vector<int32_t> free_;
  int32_t count_ = 0;
};

}  // namespace

void Engine::convolve(const SwarmStateRows& rows, const float* const* starts, float* const* saved,
                      const SwarmConvolution& how, const float* x, int64_t x_row, float* y) {
  const int64_t chunks = ceil_div(how.channels, CHANNELS_AN_ITEM), before = how.taps - 1;
  float* windows = scratch_.take(rows.starts * before * how.channels);
  const auto channels = [&](int64_t item) {
    const int64_t begin = item % chunks * CHANNELS_AN_ITEM;
    return std::pair{begin, std::min(begin + CHANNELS_AN_ITEM, how.channels)};
  };
  pool_->run(rows.starts * chunks, [&](int64_t item, int) {
    const auto [begin, end] = channels(item);
    const float* state = starts[item / chunks];
    float* window = windows + item / chunks * before * how.channels;
    for (int64_t t = 0; t < before; t++)
      for (int64_t c = begin; c < end; c++)
        window[t * how.channels + c] = state ? state[c * how.taps + t + 1] : 0.0f;
  });
  const Inputs inputs{rows, how, x, windows, x_row};
  pool_->run(rows.rows * chunks, [&](int64_t item, int) {
    const auto [begin, end] = channels(item);
    const float* taps[MAX_TAPS];
    inputs.before(item / chunks, taps);
    table_->convolve(taps, how, begin, end, y + item / chunks * how.channels);
  });
  pool_->run(rows.saves * chunks, [&](int64_t item, int) {
    const auto [begin, end] = channels(item);
    const float* taps[MAX_TAPS];
    inputs.before(rows.saved_row[item / chunks], taps);
    float* state = saved[item / chunks];
    for (int64_t t = 0; t < how.taps; t++)
      for (int64_t c = begin; c < end; c++) state[c * how.taps + t] = taps[t][c];
  });
}

// A state is advanced in place by the last row that continues it.
void Engine::recur(const SwarmStateRows& rows, const float* const* starts, float* const* saved,
                   const SwarmRecurrence& how) {
  std::vector<int32_t> children(rows.rows, 0), of_start(rows.starts, 0), slot(rows.rows), start_slot(rows.starts, -1);
  for (int64_t r = 0; r < rows.rows; r++) (rows.parent[r] < 0 ? of_start[-1 - rows.parent[r]] : children[rows.parent[r]])++;
  std::vector<int32_t> first_save(rows.rows + 1, 0), saves(rows.saves);
  for (int64_t i = 0; i < rows.saves; i++) first_save[rows.saved_row[i] + 1]++;
  for (int64_t r = 0; r < rows.rows; r++) first_save[r + 1] += first_save[r];
  std::vector<int32_t> next_save(first_save);
  for (int32_t i = 0; i < rows.saves; i++) saves[next_save[rows.saved_row[i]]++] = i;

  Slots slots;
  std::vector<StateStep> steps;
  std::vector<int32_t> left(children);
  for (int64_t i = 0; i < rows.rows; i++) {
    const int32_t row = rows.order[i], parent = rows.parent[row], start = -1 - parent;
    StateStep step{row, 0, 0, -1, first_save[row], first_save[row + 1]};
    if (parent < 0 && start_slot[start] < 0) step.start = start, start_slot[start] = slots.take();
    step.from = parent < 0 ? start_slot[start] : slot[parent];
    step.to = --(parent < 0 ? of_start[start] : left[parent]) == 0 ? step.from : slots.take();
    slot[row] = step.to;
    if (children[row] == 0) slots.give_back(step.to);
    steps.push_back(step);
  }

  const int64_t keys = ceil_div(how.key_dim, 2) * 2, columns = table_->state_columns;
  const int64_t heads_keys = how.key_heads * keys, decays = how.heads * (how.decay_by_key ? keys : 1);
  float* query = scratch_.take(rows.rows * heads_keys);
  float* key = scratch_.take(rows.rows * heads_keys);
  float* decay = scratch_.take(rows.rows * decays);
  each_row(rows.rows, [&](int64_t row) {
    table_->prepare_recurrence(how, row, keys, query + row * heads_keys, key + row * heads_keys, decay + row * decays);
  });
  const RecurrenceJob job{&how, steps.data(), rows.rows, saves.data(), starts, saved, query, key, decay, keys};
  const int64_t parts = ceil_div(how.value_dim, columns), size = slots.count() * keys * columns;
  float* memory = scratch_.take(pool_->threads() * size);
  pool_->run(how.heads * parts, [&](int64_t item, int thread) {
    table_->recur(job, item / parts, item % parts * columns, memory + thread * size);
  });
}

void Engine::norm_gated(const SwarmGatedNorm& how, const float* x, const float* gate, int64_t gate_row, int64_t rows,
                        float* y) {
  each_row(rows, [&](int64_t row) {
    const int64_t at = row * how.groups * how.size;
    for (int64_t g = 0; g < how.groups * how.size; g += how.size) {
      const float* weight = how.weight + (how.weight_by_group ? g : 0);
      table_->norm_gated(how, x + at + g, gate + row * gate_row + g, weight, y + at + g);
    }
  });
}

}  // namespace swarm
