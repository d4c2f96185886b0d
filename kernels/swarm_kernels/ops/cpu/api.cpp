// The C functions Python calls. Each takes the engine's lock, so any thread may call; the GIL is not held meanwhile.
#if defined(SWARM_X86)
#include <cpuid.h>
#endif
#include <pthread.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "abi.h"
#include "op_schedule.h"

#if defined(SWARM_X86)
namespace avx512bf16 { extern const swarm::KernelTable table; }
namespace avx512vnni { extern const swarm::KernelTable table; }
namespace avx512 { extern const swarm::KernelTable table; }
namespace avx2 { extern const swarm::KernelTable table; }
#endif
namespace generic { extern const swarm::KernelTable table; }

namespace {

using swarm::Engine;

#if defined(SWARM_X86)
// Not every compiler's __builtin_cpu_supports has these.
bool dots_bf16() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1);
}
bool widens_fp16() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx >> 29 & 1);
}
#endif

// The kernels of this name, or the best ones for null and "".
const swarm::KernelTable* find(const char* name) {
  if (name && !*name) name = nullptr;
#if defined(SWARM_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && widens_fp16();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (vnni && dots_bf16() && (!name || !std::strcmp(name, "avx512bf16"))) return &avx512bf16::table;
  if (vnni && (!name || !std::strcmp(name, "avx512vnni"))) return &avx512vnni::table;
  if (avx512 && (!name || !std::strcmp(name, "avx512"))) return &avx512::table;
  if (avx2 && (!name || !std::strcmp(name, "avx2"))) return &avx2::table;
#endif
  return !name || !std::strcmp(name, "generic") ? &generic::table : nullptr;
}

// The selected settings; a forked child keeps them.
const swarm::KernelTable* chosen = nullptr;
int requested_threads = 1;

struct State {
  std::mutex lock;
  Engine engine;
};

// Never destroyed, because workers may still sleep in it at exit. After a fork the child has no workers and the lock
// may be held by a thread that does not exist there, so the child makes a new state.
State* state = nullptr;
void renew() { state = new State; }
__attribute__((constructor)) void start() {
  chosen = find(nullptr);
  renew();
  pthread_atfork(nullptr, nullptr, renew);
}

template <typename Work>
int32_t locked(const Work& work) {
  std::lock_guard<std::mutex> lock(state->lock);
  try {
    state->engine.prepare(*chosen, requested_threads);
    work(state->engine);
    return SWARM_OK;
  } catch (const std::bad_alloc&) {
    return SWARM_NO_MEMORY;
  }
}

bool within(int64_t value, int64_t end) { return value >= 0 && value < end; }

template <typename T>
bool all_within(const T* values, int64_t count, int64_t end) {
  for (int64_t i = 0; i < count; i++)
    if (!within((int64_t)values[i], end)) return false;
  return true;
}

// Whether no bit of the mask is at or beyond the sequence's tree slots.
bool mask_fits(const uint64_t* mask, int64_t mask_words, int64_t slots) {
  for (int64_t w = 0; w < mask_words; w++) {
    const int64_t left = slots - w * 64;
    if (left < 64 && mask[w] >> (left > 0 ? left : 0)) return false;
  }
  return true;
}

// Whether `order` has every row once, after its parent, and parents, starts and saves exist.
bool valid(const SwarmStateRows& rows) {
  std::vector<char> done(rows.rows, 0);
  for (int64_t i = 0; i < rows.rows; i++) {
    const int64_t row = rows.order[i];
    if (!within(row, rows.rows) || done[row]) return false;
    const int64_t parent = rows.parent[row];
    if (parent < 0 ? !within(-1 - parent, rows.starts) : !within(parent, rows.rows) || !done[parent]) return false;
    done[row] = 1;
  }
  return all_within(rows.saved_row, rows.saves, rows.rows);
}

}  // namespace

extern "C" {

const char* swarm_isa() { return chosen->name; }

int32_t swarm_use_isa(const char* name) {
  const swarm::KernelTable* table = find(name);
  if (!table) return SWARM_UNKNOWN_ISA;
  std::lock_guard<std::mutex> lock(state->lock);
  chosen = table;
  return SWARM_OK;
}

void swarm_set_threads(int32_t count) {
  std::lock_guard<std::mutex> lock(state->lock);
  requested_threads = count;
  state->engine.set_core_groups(count, {});
}

// `count` threads, of which the last `slow` compute `slow_permille` of the columns of each linear, pinned to their own
// cores. A forked child has one group again.
void swarm_split_columns(int32_t count, int32_t slow, int32_t slow_permille, const int32_t* fast_cores,
                         int32_t fast_count, const int32_t* slow_cores, int32_t slow_count) {
  std::lock_guard<std::mutex> lock(state->lock);
  requested_threads = count;
  state->engine.set_core_groups(count, {slow, slow_permille, {std::vector<int>(fast_cores, fast_cores + fast_count),
                                                      std::vector<int>(slow_cores, slow_cores + slow_count)}});
}

void swarm_advise_huge(void* memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  const int64_t page = 2 << 20;
  char* begin = reinterpret_cast<char*>((reinterpret_cast<int64_t>(memory) + page - 1) / page * page);
  char* end = static_cast<char*>(memory) + bytes;
  if (end - begin >= page) madvise(begin, (end - begin) / page * page, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

int32_t swarm_check_plan(const SwarmPlan* plan, int64_t blocks) {
  const SwarmPlan& p = *plan;
  const int64_t slots = blocks * swarm::KV_BLOCK;
  if (!all_within(p.sequence_index, p.rows, p.sequences)) return SWARM_BAD_SEQUENCE;
  if (!all_within(p.context_lens, p.rows, p.max_blocks * swarm::KV_BLOCK + 1)) return SWARM_BAD_CONTEXT_LEN;
  if (!all_within(p.slot_mapping, p.rows, slots)) return SWARM_BAD_SLOT;
  if (!all_within(p.block_tables, p.sequences * p.max_blocks, blocks)) return SWARM_BAD_BLOCK;
  if (!all_within(p.tree_block_tables, p.sequences * p.max_tree_blocks, blocks)) return SWARM_BAD_TREE_BLOCK;
  for (int64_t r = 0; r < p.rows; r++)
    if (!mask_fits(p.tree_mask + r * p.mask_words, p.mask_words, p.max_tree_blocks * swarm::KV_BLOCK))
      return SWARM_BAD_TREE_MASK;
  if (!all_within(p.copy_from, p.copies, slots) || !all_within(p.copy_to, p.copies, slots)) return SWARM_BAD_COPY;
  return SWARM_OK;
}

int32_t swarm_linear(const SwarmLinear* weights, const float* x, int64_t rows, float* y) {
  return locked([&](Engine& engine) { engine.linear(*weights, x, rows, y); });
}

int32_t swarm_head_linears(const SwarmLinear* weights, int64_t heads, const float* x, int64_t x_head, int64_t x_row,
                           int64_t rows, float* y, int64_t y_head, int64_t y_row) {
  return locked([&](Engine& engine) { engine.head_linears(*weights, heads, {x, x_head, x_row}, rows, {y, y_head, y_row}); });
}

int32_t swarm_experts(const SwarmExperts* experts, const float* x, const int64_t* index, const float* scores,
                      int64_t rows, int64_t chosen, float* y) {
  if (!all_within(index, rows * chosen, experts->experts)) return SWARM_BAD_EXPERT;
  return locked([&](Engine& engine) { engine.experts(*experts, x, index, scores, rows, chosen, y); });
}

// outputs [rows, chosen, hidden], scores [rows, chosen] -> y [rows, hidden].
int32_t swarm_sum_experts(const float* outputs, const float* scores, int64_t rows, int64_t chosen, int64_t hidden,
                          float* y) {
  return locked([&](Engine& engine) { engine.sum_experts(outputs, nullptr, scores, rows, chosen, hidden, y); });
}

// starts [rows.starts], each a state or null for zeros; saved [rows.saves], each a state to fill.
int32_t swarm_convolve(const SwarmStateRows* rows, const float* const* starts, float* const* saved,
                       const SwarmConvolution* how, const float* x, int64_t x_row, float* y) {
  if (!valid(*rows) || how->taps < 1 || how->taps > swarm::MAX_TAPS) return SWARM_BAD_STATE_ROWS;
  return locked([&](Engine& engine) { engine.convolve(*rows, starts, saved, *how, x, x_row, y); });
}

int32_t swarm_recur(const SwarmStateRows* rows, const float* const* starts, float* const* saved,
                    const SwarmRecurrence* how) {
  if (!valid(*rows)) return SWARM_BAD_STATE_ROWS;
  return locked([&](Engine& engine) { engine.recur(*rows, starts, saved, *how); });
}

int32_t swarm_norm_gated(const SwarmGatedNorm* how, const float* x, const float* gate, int64_t gate_row, int64_t rows,
                         float* y) {
  return locked([&](Engine& engine) { engine.norm_gated(*how, x, gate, gate_row, rows, y); });
}

// log(1 + e^x), each number by itself: torch rounds one by its place in a tensor.
void swarm_softplus(const float* x, int64_t count, float* y) {
  for (int64_t i = 0; i < count; i++) y[i] = x[i] > 20.0f ? x[i] : std::log1p(std::exp(x[i]));
}

int32_t swarm_rms_norm(const float* x, int64_t rows, int64_t in, const float* weight, float eps, float* y) {
  return locked([&](Engine& engine) { engine.rms_norm(x, rows, in, weight, eps, y); });
}

int32_t swarm_commit_tree_slots(const SwarmCache* cache, const int64_t* from, const int64_t* to, int64_t count) {
  return locked([&](Engine& engine) { engine.commit_tree_slots(*cache, from, to, count); });
}

// q [rows, heads, dim], k [rows, kv_heads, dim], v [rows, kv_heads, value_dim], out [rows, heads, size of a value].
int32_t swarm_attend(const float* q, const float* k, const float* v, int64_t heads, const SwarmCache* cache,
                     const SwarmPlan* plan, const SwarmScoring* scoring, float* out) {
  return locked([&](Engine& engine) {
    const Engine::Heads in{q, k, v, heads * cache->dim, cache->kv_heads * cache->dim,
                           cache->kv_heads * cache->value_dim, heads};
    engine.commit_tree_slots(*cache, plan->copy_from, plan->copy_to, plan->copies);
    engine.append(*cache, *plan, in, nullptr);
    engine.attend(*cache, *plan, in, *scoring, out);
  });
}

// hidden [rows, width] in place, through `count` layers. cos, sin [tables, rows, rot].
int32_t swarm_layers(const SwarmLayer* const* layers, const SwarmCache* caches, int64_t count, const SwarmPlan* plan,
                     const float* cos, const float* sin, int64_t rot, float* hidden) {
  return locked([&](Engine& engine) {
    for (int64_t i = 0; i < count; i++) {
      engine.prepare(*chosen, requested_threads);
      engine.commit_tree_slots(caches[i], plan->copy_from, plan->copy_to, plan->copies);
      engine.layer(*layers[i], caches[i], *plan, {cos, sin, rot}, hidden);
    }
  });
}

// One layer up to its experts: hidden [rows, width] in place, x likewise, index and scores [rows, chosen] are written.
int32_t swarm_layer_to_experts(const SwarmLayer* layer, const SwarmCache* cache, const SwarmPlan* plan,
                               const float* cos, const float* sin, int64_t rot, float* hidden, float* x,
                               int64_t* index, float* scores) {
  return locked([&](Engine& engine) {
    engine.commit_tree_slots(*cache, plan->copy_from, plan->copy_to, plan->copies);
    engine.layer_to_experts(*layer, *cache, *plan, {cos, sin, rot}, hidden, x, index, scores);
  });
}

// ... and the rest of it, from the sums of their outputs, part [rows, width], which is overwritten.
int32_t swarm_layer_from_experts(const SwarmLayer* layer, const float* x, int64_t rows, float* part, float* hidden) {
  return locked([&](Engine& engine) { engine.mixture_output(*layer, x, rows, part, hidden); });
}

}  // extern "C"
