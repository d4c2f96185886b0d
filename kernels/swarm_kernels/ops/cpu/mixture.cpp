// A layer's mixture of experts, from the residual stream and back to it: router, choice, experts, shared expert.
#include <algorithm>

#include "op_schedule.h"

namespace swarm {

void Engine::mixture(const SwarmLayer& layer, int64_t rows, float* hidden) {
  const SwarmMixture& all = *layer.mixture;
  const int64_t width = all.experts.hidden, chosen = all.routing.chosen;
  const float* x = hidden;
  if (layer.mlp_norm) {
    float* normed = scratch_.take(rows * width);
    mixture_input(layer, rows, hidden, normed);
    x = normed;
  }
  float* scores = scratch_.take(rows * chosen);
  std::vector<int64_t> index(rows * chosen);
  route(all, x, rows, index.data(), scores);
  float* part = scratch_.take(rows * width);
  experts(all.experts, x, index.data(), scores, rows, chosen, part);
  mixture_output(layer, x, rows, part, hidden);
}

void Engine::mixture_input(const SwarmLayer& layer, int64_t rows, const float* hidden, float* x) {
  const int64_t width = layer.mixture->experts.hidden;
  each_row(rows, [&](int64_t row) {
    const float* from = hidden + row * width;
    if (layer.mlp_norm)
      table_->scale_row(from, width, table_->inverse_rms(from, width, layer.eps), layer.mlp_norm, x + row * width);
    else
      std::copy(from, from + width, x + row * width);
  });
}

void Engine::mixture_output(const SwarmLayer& layer, const float* x, int64_t rows, float* part, float* hidden) {
  const SwarmMixture& all = *layer.mixture;
  if (all.shared_down.weight) add_shared(all, x, rows, part);
  add_rows(layer, part, rows, all.experts.hidden, layer.mlp_post_norm, layer.rounds_to_bf16, hidden);
}

void Engine::layer_to_experts(const SwarmLayer& layer, const SwarmCache& cache, const SwarmPlan& plan,
                              const RotaryTables& tables, float* hidden, float* x, int64_t* index, float* scores) {
  attention(layer, cache, plan, tables, hidden);
  mixture_input(layer, plan.rows, hidden, x);
  route(*layer.mixture, x, plan.rows, index, scores);
}

void Engine::route(const SwarmMixture& all, const float* x, int64_t rows, int64_t* index, float* scores) {
  const int64_t experts = all.router.out, chosen = all.routing.chosen;
  float* logits = scratch_.take(rows * experts);
  float* work = scratch_.take(rows * 3 * experts);
  gemm(all.router, x, rows, nullptr, LinearJob::STORE, logits, experts);
  each_row(rows, [&](int64_t row) {
    table_->route_row(all.routing, all.correction, experts, logits + row * experts, work + row * 3 * experts,
                      index + row * chosen, scores + row * chosen);
  });
}

// part [rows, width] += the shared expert's outputs, times the sigmoid of its gate if there is one.
void Engine::add_shared(const SwarmMixture& all, const float* x, int64_t rows, float* part) {
  const int64_t middle = all.shared_down.in, width = all.shared_down.out;
  float* gated = scratch_.take(rows * middle);
  gemm(all.shared_gate_up, x, rows, nullptr, LinearJob::GATE_UP, gated, middle, all.shared_activation);
  if (!all.shared_gate.weight) {
    gemm(all.shared_down, gated, rows, nullptr, LinearJob::ADD, part, width);
    return;
  }
  float* gates = scratch_.take(rows);
  float* shared = scratch_.take(rows * width);
  gemm(all.shared_gate, x, rows, nullptr, LinearJob::STORE, gates, 1);
  gemm(all.shared_down, gated, rows, nullptr, LinearJob::STORE, shared, width);
  const SwarmRouting sigmoid{SWARM_SIGMOID, 0, 0.0f, 1.0f, 1, 1, 1};
  each_row(rows, [&](int64_t row) {
    float work[3], gate;
    int64_t sole;
    table_->route_row(sigmoid, nullptr, 1, gates + row, work, &sole, &gate);
    table_->add_row(shared + row * width, width, gate, nullptr, false, part + row * width);
  });
}

}  // namespace swarm
