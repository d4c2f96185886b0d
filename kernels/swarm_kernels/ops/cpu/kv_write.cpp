// Writes to the KV cache: a batch's new keys and values, and commits of tree slots.
#include <algorithm>

#include "op_schedule.h"

namespace swarm {

// One item per KV head and 16 rows; with a rotation it also norms and rotates the query heads of that KV head.
void Engine::append(const SwarmCache& cache, const SwarmPlan& plan, const Heads& in, const Rotation* rotation) {
  const int64_t line = KV_BLOCK * (cache.bf16 ? 2 : 4);
  const int64_t items = (plan.rows + KV_BLOCK - 1) / KV_BLOCK * cache.kv_heads;
  const auto work = [&](int64_t item, int) {
    const int64_t group = item % cache.kv_heads, begin = item / cache.kv_heads * KV_BLOCK;
    for (int64_t r = begin; r < std::min(plan.rows, begin + KV_BLOCK); r++) {
      if (rotation) rotate(*rotation, r, group);
      const int64_t kv_block = plan.slot_mapping[r] / KV_BLOCK, offset = plan.slot_mapping[r] % KV_BLOCK;
      const int64_t at = (kv_block * cache.kv_heads + group) * line;
      table_->write_kv(in.k + r * in.ldk + group * cache.dim, in.v + r * in.ldv + group * cache.value_dim, cache.dim,
                       cache.value_dim, offset, cache.bf16 != 0, static_cast<char*>(cache.k) + at * cache.dim,
                       static_cast<char*>(cache.v) + at * cache.value_dim);
    }
  };
  if (rotation && rotation->layer->norm_is_whole) norm_all_heads(*rotation, plan.rows);
  if (plan.rows > 4)
    pool_->run(items, work);
  else  // faster than starting a parallel region
    for (int64_t item = 0; item < items; item++) work(item, 0);
}

// RMS norm over all query heads of a row at once, and over all its key heads.
void Engine::norm_all_heads(const Rotation& how, int64_t rows) {
  const SwarmLayer& layer = *how.layer;
  const int64_t queries = layer.heads * layer.head_dim, keys = layer.kv_heads * layer.head_dim;
  const auto norm = [&](float* x, int64_t width, const float* weight) {
    if (weight) table_->scale_row(x, width, table_->inverse_rms(x, width, layer.eps), weight, x);
  };
  const auto work = [&](int64_t row, int) {
    float* heads = how.qkv + row * layer.qkv.out;
    norm(heads, queries, layer.q_norm);
    norm(heads + queries, keys, layer.k_norm);
  };
  if (rows > 4)
    pool_->run(rows, work);
  else
    for (int64_t row = 0; row < rows; row++) work(row, 0);
}

// Head norm and RoPE of one KV head of one row, and of the query heads that share it.
void Engine::rotate(const Rotation& how, int64_t row, int64_t group) {
  const SwarmLayer& layer = *how.layer;
  const int64_t dim = layer.head_dim, queries_per_kv = layer.heads / layer.kv_heads, rot = how.table.rot;
  const auto turn = [&](float* head, const float* norm) {
    if (norm && !layer.norm_is_whole)
      table_->scale_row(head, dim, table_->inverse_rms(head, dim, layer.eps), norm, head);
    table_->rope(head, rot, how.table.cos + row * rot, how.table.sin + row * rot);
  };
  float* heads = how.qkv + row * layer.qkv.out;
  for (int64_t h = group * queries_per_kv; h < (group + 1) * queries_per_kv; h++) turn(heads + h * dim, layer.q_norm);
  turn(heads + (layer.heads + group) * dim, layer.k_norm);
}

namespace {

int64_t row_size(const SwarmCache& cache) { return cache.kv_heads * (cache.dim + cache.value_dim); }

// Slot `slot` of the cache to or from a row of [groups][dim + value_dim] elements.
template <typename T, bool OUT>
void transfer(const SwarmCache& cache, int64_t slot, T* row) {
  const int64_t offset = slot % KV_BLOCK;
  for (int64_t g = 0; g < cache.kv_heads; g++, row += cache.dim + cache.value_dim) {
    const int64_t at = (slot / KV_BLOCK * cache.kv_heads + g) * KV_BLOCK;
    T *k = static_cast<T*>(cache.k) + at * cache.dim + offset;
    T *v = static_cast<T*>(cache.v) + (at + offset) * cache.value_dim, *values = row + cache.dim;
    for (int64_t d = 0; d < cache.dim; d++)
      if constexpr (OUT)
        row[d] = k[d * KV_BLOCK];
      else
        k[d * KV_BLOCK] = row[d];
    if constexpr (OUT)
      std::copy_n(v, cache.value_dim, values);
    else
      std::copy_n(values, cache.value_dim, v);
  }
}

template <typename T>
void copy_slots(const SwarmCache& cache, const int64_t* from, const int64_t* to, int64_t count, T* rows) {
  const int64_t size = row_size(cache);
  for (int64_t i = 0; i < count; i++) transfer<T, true>(cache, from[i], rows + i * size);
  for (int64_t i = 0; i < count; i++) transfer<T, false>(cache, to[i], rows + i * size);
}

}  // namespace

void Engine::commit_tree_slots(const SwarmCache& cache, const int64_t* from, const int64_t* to, int64_t count) {
  if (count == 0) return;
  float* rows = scratch_.take(count * row_size(cache));
  if (cache.bf16)
    copy_slots(cache, from, to, count, reinterpret_cast<uint16_t*>(rows));
  else
    copy_slots(cache, from, to, count, rows);
}

}  // namespace swarm
