// Schedules the ops: splits each call into work items, orders them and runs them on the thread pool. One call at a
// time.
#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include "abi.h"
#include "kernels.h"
#include "threadpool.h"

namespace swarm {

// Floats that live until the call ends; the memory is kept for the next call.
class Scratch {
 public:
  struct Mark {
    size_t chunk = 0;
    int64_t used = 0;
  };
  float* take(int64_t count);
  Mark mark() const { return {current_, used_}; }
  void release(const Mark& since) { current_ = since.chunk, used_ = since.used; }  // what was taken since
  void reset() { release({}); }

 private:
  struct Free {
    void operator()(float* p) const;
  };
  struct Chunk {
    std::unique_ptr<float[], Free> memory;
    int64_t size;
  };
  std::vector<Chunk> chunks_;
  size_t current_ = 0;
  int64_t used_ = 0;
};

// Rows of heads: number i of head h of row r is at first[h * head_stride + r * row_stride + i].
template <typename T>
struct HeadRows {
  T* first;
  int64_t head_stride, row_stride;
};

constexpr int64_t FEW_ROWS = 4;  // faster on one thread than starting a parallel region

class Engine {
 public:
  // Before each op: selects kernels and threads, and frees the scratch memory of the previous op.
  void prepare(const KernelTable& table, int threads);
  // From now on split linears and attention between two core groups, or, without slow threads, use one group.
  void set_core_groups(int threads, const CoreGroups& units);

  void linear(const SwarmLinear& weights, const float* x, int64_t rows, float* y);
  // Head h of x [rows, heads, in] by outputs [h, h + 1) * out / heads of the weights, fp32 or bf16 without bias, to head h
  // of y; out / heads is a multiple of 16.
  void head_linears(const SwarmLinear& weights, int64_t heads, const HeadRows<const float>& x, int64_t rows,
                    const HeadRows<float>& y);
  void rms_norm(const float* x, int64_t rows, int64_t in, const float* weight, float eps, float* y);
  // x [rows, hidden] -> y likewise: of each row, the outputs of its `chosen` experts, index [rows, chosen], times scores.
  void experts(const SwarmExperts& all, const float* x, const int64_t* index, const float* scores, int64_t rows,
               int64_t chosen, float* y);
  // outputs [rows * chosen, hidden] of rows' experts -> y [rows, hidden]: their sums, times scores [rows, chosen], in
  // order. Those of pair i are at place[i], or at i if `place` is null.
  void sum_experts(const float* outputs, const int64_t* place, const float* scores, int64_t rows, int64_t chosen,
                   int64_t hidden, float* y);
  // x [rows, channels] with row stride x_row -> y [rows, channels]. A start may be null: zeros.
  void convolve(const SwarmStateRows& rows, const float* const* starts, float* const* saved,
                const SwarmConvolution& how, const float* x, int64_t x_row, float* y);
  void recur(const SwarmStateRows& rows, const float* const* starts, float* const* saved, const SwarmRecurrence& how);
  // x [rows, groups * size], gates with row stride gate_row -> y like x.
  void norm_gated(const SwarmGatedNorm& how, const float* x, const float* gate, int64_t gate_row, int64_t rows,
                  float* y);
  void commit_tree_slots(const SwarmCache& cache, const int64_t* from, const int64_t* to, int64_t count);
  // q [rows, heads, dim] with row stride ldq, and so on; `out` [rows, heads * (size of a value)]. q is scaled in a copy.
  struct Heads {
    const float *q, *k, *v;
    int64_t ldq, ldk, ldv, heads;
  };
  // Cosines and sines [tables, rows, rot].
  struct RotaryTables {
    const float *cos, *sin;
    int64_t rot;
  };
  // How to norm and rotate the heads of `qkv` [rows, (heads + 2 kv_heads) dim] before they are used; rot may be 0.
  struct Rotation {
    const SwarmLayer* layer;
    RotaryTables table;
    float* qkv;
  };
  void append(const SwarmCache& cache, const SwarmPlan& plan, const Heads& in, const Rotation* rotation);
  void attend(const SwarmCache& cache, const SwarmPlan& plan, const Heads& in, const SwarmScoring& scoring,
              float* out);
  // hidden [rows, layer.o.out], in place
  void layer(const SwarmLayer& layer, const SwarmCache& cache, const SwarmPlan& plan, const RotaryTables& tables,
             float* hidden);
  // The same layer in two parts, for experts that are elsewhere: up to x [rows, hidden], which experts read, and their
  // index and scores [rows, chosen]; then from the experts' sums `part` [rows, hidden], which is overwritten.
  void layer_to_experts(const SwarmLayer& layer, const SwarmCache& cache, const SwarmPlan& plan,
                        const RotaryTables& tables, float* hidden, float* x, int64_t* index, float* scores);
  void mixture_output(const SwarmLayer& layer, const float* x, int64_t rows, float* part, float* hidden);

 private:
  struct Norm {
    const float* weight;
    float eps;
  };
  // The parts of a layer: each adds to hidden; `bf16`: rounds it then.
  void attention(const SwarmLayer& layer, const SwarmCache& cache, const SwarmPlan& plan, const RotaryTables& tables,
                 float* hidden);
  void mlp(const SwarmLayer& layer, int64_t rows, float* hidden);
  void mixture(const SwarmLayer& layer, int64_t rows, float* hidden);
  void mixture_input(const SwarmLayer& layer, int64_t rows, const float* hidden, float* x);
  void add_part(const SwarmLayer& layer, const SwarmLinear& last, const float* x, int64_t rows, const float* post_norm,
                bool bf16, float* hidden);
  void add_rows(const SwarmLayer& layer, const float* part, int64_t rows, int64_t width, const float* post_norm,
                bool bf16, float* hidden);
  // x [rows, hidden] -> index and scores [rows, chosen].
  void route(const SwarmMixture& all, const float* x, int64_t rows, int64_t* index, float* scores);
  void add_shared(const SwarmMixture& all, const float* x, int64_t rows, float* part);
  // Calls work(row) for each.
  template <typename Work>
  void each_row(int64_t rows, const Work& work) {
    if (rows > FEW_ROWS)
      pool_->run(rows, [&](int64_t row, int) { work(row); });
    else
      for (int64_t row = 0; row < rows; row++) work(row);
  }
  // `norm` of the rows of x, or null.
  void gemm(const SwarmLinear& weights, const float* x, int64_t rows, const Norm* norm, LinearJob::Epilogue epilogue,
            float* y, int64_t ldy, SwarmActivation activation = SWARM_SILU);
  void add_column_ends(int64_t begin, int64_t end, int64_t threads, int64_t tiles);
  const char* quantized_tiles(const SwarmLinear& weights, const float* x, int64_t rows, int64_t tile_rows,
                                 const Norm* norm);
  const char* packed_tiles(const SwarmLinear& weights, const float* x, int64_t rows, int64_t tile_rows,
                           const Norm* norm);
  void norm_all_heads(const Rotation& how, int64_t rows);
  void some_experts(const SwarmExperts& all, const float* x, const int64_t* index, const float* scores, int64_t rows,
                    int64_t chosen, float* y);
  void rotate(const Rotation& how, int64_t row, int64_t group);

  const KernelTable* table_ = nullptr;
  std::unique_ptr<ThreadPool> pool_ = std::make_unique<ThreadPool>(1);
  Scratch scratch_;
  std::vector<int64_t> ends_;  // of the items of a linear
  int64_t slow_permille_ = 0;
};

}  // namespace swarm
