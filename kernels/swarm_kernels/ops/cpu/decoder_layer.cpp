// A decoder layer and its parts, as sequences of ops. What the fields of SwarmLayer mean is in layer_weights.py.
#include "op_schedule.h"

namespace swarm {

void Engine::layer(const SwarmLayer& layer, const SwarmCache& cache, const SwarmPlan& plan, const RotaryTables& tables,
                   float* hidden) {
  attention(layer, cache, plan, tables, hidden);
  if (layer.mixture)
    mixture(layer, plan.rows, hidden);
  else
    mlp(layer, plan.rows, hidden);
}

void Engine::attention(const SwarmLayer& layer, const SwarmCache& cache, const SwarmPlan& plan,
                       const RotaryTables& tables, float* hidden) {
  const int64_t rows = plan.rows, dim = layer.head_dim, ld = layer.qkv.out;
  float* qkv = scratch_.take(rows * ld);
  float* mixed = scratch_.take(rows * layer.heads * dim);
  const Norm norm{layer.attn_norm, layer.eps};
  gemm(layer.qkv, hidden, rows, layer.attn_norm ? &norm : nullptr, LinearJob::STORE, qkv, ld);
  const float* k = qkv + layer.heads * dim;
  const Heads heads{qkv, k, k + layer.kv_heads * dim, ld, ld, ld, layer.heads};
  const int64_t offset = layer.rope > 0 ? layer.rope * rows * tables.rot : 0;
  const RotaryTables table{tables.cos + offset, tables.sin + offset, layer.rope < 0 ? 0 : tables.rot};
  const Rotation rotation{&layer, table, qkv};
  append(cache, plan, heads, &rotation);
  attend(cache, plan, heads, layer.scoring, mixed);
  add_part(layer, layer.o, mixed, rows, layer.attn_post_norm, false, hidden);
}

void Engine::mlp(const SwarmLayer& layer, int64_t rows, float* hidden) {
  const int64_t middle = layer.gate_up.out / 2;
  float* gated = scratch_.take(rows * middle);
  const Norm norm{layer.mlp_norm, layer.eps};
  gemm(layer.gate_up, hidden, rows, layer.mlp_norm ? &norm : nullptr, LinearJob::GATE_UP, gated, middle,
       layer.activation);
  add_part(layer, layer.down, gated, rows, layer.mlp_post_norm, layer.rounds_to_bf16, hidden);
}

// hidden += residual_scale * post_norm(last(x)), rounded to bf16 if `bf16`
void Engine::add_part(const SwarmLayer& layer, const SwarmLinear& last, const float* x, int64_t rows,
                      const float* post_norm, bool bf16, float* hidden) {
  const int64_t width = last.out;
  if (!post_norm && layer.residual_scale == 1.0f) {
    gemm(last, x, rows, nullptr, bf16 ? LinearJob::ADD_BF16 : LinearJob::ADD, hidden, width);
    return;
  }
  float* part = scratch_.take(rows * width);
  gemm(last, x, rows, nullptr, LinearJob::STORE, part, width);
  add_rows(layer, part, rows, width, post_norm, bf16, hidden);
}

// hidden += residual_scale * post_norm(part), [rows, width], rounded to bf16 if `bf16`
void Engine::add_rows(const SwarmLayer& layer, const float* part, int64_t rows, int64_t width, const float* post_norm,
                      bool bf16, float* hidden) {
  each_row(rows, [&](int64_t row) {
    const float* from = part + row * width;
    const float scale = post_norm ? table_->inverse_rms(from, width, layer.eps) : 1.0f;
    table_->add_row(from, width, scale * layer.residual_scale, post_norm, bf16, hidden + row * width);
  });
}

}  // namespace swarm
