// What is written into the pages: a batch's new keys and values, and tree slots that are committed.
#include <algorithm>

#include "op_schedule.h"

namespace swarm {

// A KV head of 16 rows an item: with its query heads, if they are to be rotated.
void Engine::append(const SwarmCache& cache, const SwarmPlan& plan, const Heads& in, const Rotation* rotation) {
  const int64_t size = cache.dim * PAGE * (cache.bf16 ? 2 : 4);
  const int64_t items = (plan.rows + PAGE - 1) / PAGE * cache.groups;
  const auto work = [&](int64_t item, int) {
    const int64_t group = item % cache.groups, begin = item / cache.groups * PAGE;
    for (int64_t r = begin; r < std::min(plan.rows, begin + PAGE); r++) {
      if (rotation) rotate(*rotation, r, group);
      const int64_t page = plan.write[r] / PAGE, offset = plan.write[r] % PAGE;
      const int64_t at = (page * cache.groups + group) * size, from = r * in.ldkv + group * cache.dim;
      table_->write_kv(in.k + from, in.v + from, cache.dim, offset, cache.bf16 != 0, static_cast<char*>(cache.k) + at,
                       static_cast<char*>(cache.v) + at);
    }
  };
  if (plan.rows > 4)
    pool_->run(items, work);
  else  // sooner done than shared out
    for (int64_t item = 0; item < items; item++) work(item, 0);
}

// Norms and turns a KV head of one row, and the query heads that share it.
void Engine::rotate(const Rotation& how, int64_t row, int64_t group) {
  const SwarmLayer& layer = *how.layer;
  const int64_t dim = layer.head_dim, share = layer.heads / layer.kv_heads;
  const auto turn = [&](float* head, const float* norm) {
    if (norm) table_->scale_row(head, dim, table_->inverse_rms(head, dim, layer.eps), norm, head);
    table_->rope(head, how.rot, how.cos + row * how.rot, how.sin + row * how.rot);
  };
  float* heads = how.qkv + row * layer.qkv.out;
  for (int64_t h = group * share; h < (group + 1) * share; h++) turn(heads + h * dim, layer.q_norm);
  turn(heads + (layer.heads + group) * dim, layer.k_norm);
}

namespace {

// Slot `slot` of the cache to or from a row of [groups][2][dim] elements.
template <typename T, bool OUT>
void transfer(const SwarmCache& cache, int64_t slot, T* row) {
  const int64_t offset = slot % PAGE;
  for (int64_t g = 0; g < cache.groups; g++, row += 2 * cache.dim) {
    const int64_t at = (slot / PAGE * cache.groups + g) * cache.dim * PAGE;
    T *k = static_cast<T*>(cache.k) + at + offset, *v = static_cast<T*>(cache.v) + at + offset * cache.dim;
    for (int64_t d = 0; d < cache.dim; d++) {
      if constexpr (OUT)
        row[d] = k[d * PAGE], row[cache.dim + d] = v[d];
      else
        k[d * PAGE] = row[d], v[d] = row[cache.dim + d];
    }
  }
}

template <typename T>
void move_all(const SwarmCache& cache, const int64_t* from, const int64_t* to, int64_t count, T* rows) {
  const int64_t size = cache.groups * 2 * cache.dim;
  for (int64_t i = 0; i < count; i++) transfer<T, true>(cache, from[i], rows + i * size);
  for (int64_t i = 0; i < count; i++) transfer<T, false>(cache, to[i], rows + i * size);
}

}  // namespace

void Engine::move_slots(const SwarmCache& cache, const int64_t* from, const int64_t* to, int64_t count) {
  if (count == 0) return;
  float* rows = scratch_.take(count * cache.groups * 2 * cache.dim);
  if (cache.bf16)
    move_all(cache, from, to, count, reinterpret_cast<uint16_t*>(rows));
  else
    move_all(cache, from, to, count, rows);
}

}  // namespace swarm
