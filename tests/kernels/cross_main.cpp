// Runs the kernels on what stdin holds and writes the results to stdout, for test_ops_neon.py: under an emulator there
// is no Python. Numbers and arrays come as they lie in memory.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "abi.h"

extern "C" {
void swarm_set_threads(int32_t count);
int32_t swarm_linear(const SwarmLinear*, const float*, int64_t, float*);
int32_t swarm_check_plan(const SwarmPlan*, int64_t);
int32_t swarm_attend(const float*, const float*, const float*, int64_t, const SwarmCache*, const SwarmPlan*,
                     const SwarmScoring*, float*);
}

namespace {

void read(void* to, size_t bytes) {
  if (bytes && std::fread(to, 1, bytes, stdin) != bytes) std::exit(2);
}

template <typename T>
std::vector<T> array(int64_t count) {
  std::vector<T> values(count + 1);  // never null
  read(values.data(), count * sizeof(T));
  return values;
}

int write(const std::vector<float>& values, int32_t status) {
  std::fwrite(values.data(), sizeof(float), values.size(), stdout);
  return status;
}

int linear() {
  enum { FORMAT, IN, OUT, ROWS, BYTES, SCALES, BIASES, COUNT };
  const auto n = array<int64_t>(COUNT);
  const auto weight = array<char>(n[BYTES]);
  const auto scale = array<float>(n[SCALES]), bias = array<float>(n[BIASES]), x = array<float>(n[ROWS] * n[IN]);
  const SwarmLinear l{weight.data(), n[SCALES] ? scale.data() : nullptr, n[BIASES] ? bias.data() : nullptr,
                      n[IN], n[OUT], (SwarmFormat)n[FORMAT], 0};
  std::vector<float> y(n[ROWS] * n[OUT]);
  return write(y, swarm_linear(&l, x.data(), n[ROWS], y.data()));
}

int attend() {
  enum { ROWS, SEQUENCES, MAX_BLOCKS, MAX_TREE_BLOCKS, WORDS, BLOCKS, KV_HEADS, DIM, BF16, HEADS, WINDOW, COUNT };
  const auto n = array<int64_t>(COUNT);
  const auto factors = array<float>(2);  // scale, softcap
  const auto positions = array<int64_t>(n[ROWS]);
  const auto sequence_index = array<int32_t>(n[ROWS]), context_lens = array<int32_t>(n[ROWS]);
  const auto slot_mapping = array<int64_t>(n[ROWS]);
  const auto block_tables = array<int32_t>(n[SEQUENCES] * n[MAX_BLOCKS]);
  const auto tree_block_tables = array<int32_t>(n[SEQUENCES] * n[MAX_TREE_BLOCKS]);
  const auto mask = array<uint64_t>(n[ROWS] * n[WORDS]);
  const auto tree_positions = array<int32_t>(n[SEQUENCES] * n[MAX_TREE_BLOCKS] * 16);
  const int64_t elements = n[BLOCKS] * n[KV_HEADS] * n[DIM] * 16, size = n[BF16] ? 2 : 4;
  auto k_blocks = array<char>(elements * size), v_blocks = array<char>(elements * size);
  const auto q = array<float>(n[ROWS] * n[HEADS] * n[DIM]);
  const auto k = array<float>(n[ROWS] * n[KV_HEADS] * n[DIM]), v = array<float>(n[ROWS] * n[KV_HEADS] * n[DIM]);
  const SwarmCache cache{k_blocks.data(), v_blocks.data(), n[BLOCKS], n[KV_HEADS], n[DIM], n[DIM],
                         (int32_t)n[BF16], 0};
  const SwarmScoring scoring{nullptr, nullptr, 0, n[WINDOW], 0, factors[0], factors[1]};
  const SwarmPlan plan{n[ROWS], n[SEQUENCES], n[MAX_BLOCKS], n[MAX_TREE_BLOCKS], n[WORDS], 0, positions.data(),
                       sequence_index.data(), context_lens.data(), slot_mapping.data(), block_tables.data(),
                       tree_block_tables.data(), mask.data(),
                       nullptr, nullptr, tree_positions.data()};
  if (const int32_t fault = swarm_check_plan(&plan, n[BLOCKS])) return fault;
  std::vector<float> out(n[ROWS] * n[HEADS] * n[DIM]);
  return write(out, swarm_attend(q.data(), k.data(), v.data(), n[HEADS], &cache, &plan, &scoring, out.data()));
}

}  // namespace

int main() {
  swarm_set_threads(2);
  for (int op = std::getchar(); op != EOF; op = std::getchar())
    if (const int status = op == 'L' ? linear() : attend()) return status;
  return 0;
}
