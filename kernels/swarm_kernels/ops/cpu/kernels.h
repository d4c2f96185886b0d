// The kernel table that every instruction set implements: serial pieces of work that Engine spreads over threads.
#pragma once
#include <cstdint>

#include "abi.h"

namespace swarm {

constexpr int64_t KV_BLOCK = 16;     // tokens in a KV block (BLOCK_SIZE in batch.py)
constexpr int64_t CHUNK = 64;    // keys of one word of a tree mask
constexpr int64_t STEP_WORDS = 2, STEP_KEYS = STEP_WORDS * CHUNK;  // one iteration of online softmax
constexpr int64_t STEP_KV_BLOCKS = STEP_KEYS / KV_BLOCK;

// Whether inputs are rounded to bf16 for such weights or quantized to 8 bits, and what the inputs of a packed row are a multiple of.
inline bool rounds_inputs(SwarmFormat weights) { return weights == SWARM_BF16 || weights == SWARM_FP8; }
inline bool quantizes_inputs(SwarmFormat weights) { return weights != SWARM_FP32 && !rounds_inputs(weights); }
inline int64_t padded_inputs(SwarmFormat weights, int64_t in) {
  const int64_t unit = !quantizes_inputs(weights) ? 1 : weights == SWARM_INT8 ? 4 : 32;
  return (in + unit - 1) / unit * unit;
}

// Activations are passed to a linear packed in tiles of `tile_rows` rows, transposed: element (r, k) of a tile is at
// k * tile_rows + r, so one stream feeds the multiply-adds of all its rows. A single row is its own tile. For bf16
// and fp8 weights see bf16.h; for other weights of 8 and 4 bits `quantize` fills them.
struct LinearJob {
  enum Epilogue { STORE, ADD, ADD_BF16, GATE_UP };
  const char* x;
  int64_t row_bytes;  // of a row in x
  int64_t rows, tile_rows;
  int64_t in;  // as packed
  const void* weight;
  const float *scale, *bias;  // or null
  SwarmFormat format;
  int64_t out;  // of the weights; with GATE_UP the result has out / 2 columns
  Epilogue epilogue;  // y = v; y += v; y = bf16(y + v); y = activation(gate) * up
  SwarmActivation activation;  // with GATE_UP
  float* y;
  int64_t ldy;
};

// Query rows of one sequence against one KV head (GQA). Query row i belongs to batch row i / queries_per_kv.
struct AttendJob {
  // Tiles as `fill_tile` packs them, the last with the remaining rows; scaled, and times log2(e) if there is no
  // softcap.
  const float* q;
  int64_t m, tile_rows, queries_per_kv, dim, value_dim;
  const void *k, *v;  // this KV head in KV block 0; the same where the values are the first numbers of the keys
  int64_t kv_block_stride;  // elements
  bool bf16;
  float softcap;  // 0: none
  const int32_t* block_table;
  int64_t block_table_len;
  const int64_t *first_key, *end_key;  // dense: batch row r sees keys [first_key[r], end_key[r])
  const uint64_t* mask;         // sparse: its bits start at mask + r * words; null: dense
  int64_t mask_words;
  int64_t prefetch_end;  // mask word up to which the same thread continues: steps before it are prefetched
  float* workspace;  // attend_workspace(m, dim) of them
  const uint64_t* chosen = nullptr;  // dense: if not null, bits of the keys that a row sees, as in mask
  int64_t chosen_words = 0;
};

// Running softmax of query rows: maximum (of log2 of the weights), sum and weighted values.
struct SoftmaxState {
  float *max, *sum, *weighted;  // [m], [m], [m, value_dim]
};

constexpr int64_t MAX_ROW_TILE = 16;
constexpr int64_t MAX_TAPS = 16;  // of a short convolution

// A row of a recurrence: from the state in slot `from`, which is start `start` where that is not negative, to slot `to`;
// then saves [save_begin, save_end) of the job's.
struct StateStep {
  int32_t row, from, to, start, save_begin, save_end;
};
struct RecurrenceJob {
  const SwarmRecurrence* how;
  const StateStep* steps;
  int64_t count;
  const int32_t* saves;
  const float* const* starts;  // null: zeros
  float* const* saved;
  const float *query, *key, *decay;  // as prepare_recurrence fills them, one row after the other
  int64_t keys;
};

struct KernelTable {
  const char* name;
  int64_t (*row_tile)(SwarmFormat weights);  // most rows of a linear's tile
  // x [rows, in] with row stride ldx -> tile, for fp32 or bf16; scale[r] * norm[k] multiply where norm is not null
  void (*fill_tile)(bool bf16, const float* x, int64_t ldx, int64_t rows, int64_t tile_rows, int64_t in,
                    const float* scale, const float* norm, float* tile);
  // The same for weights of 8 and 4 bits, one row.
  void (*quantize)(SwarmFormat weights, const float* x, int64_t in, float scale, const float* norm, int64_t tile_rows,
                   int64_t row, char* tile);
  int64_t (*row_bytes)(SwarmFormat weights, int64_t in);  // of a tile, for each of its rows
  void (*linear)(const LinearJob&, int64_t tile_begin, int64_t tile_end, int64_t block_begin, int64_t block_end);
  float (*inverse_rms)(const float* x, int64_t in, float eps);
  void (*scale_row)(const float* x, int64_t in, float scale, const float* norm, float* y);
  // y += x * scale * norm, rounded to bf16 if `bf16`
  void (*add_row)(const float* x, int64_t in, float scale, const float* norm, bool bf16, float* y);
  void (*rope)(float* head, int64_t rot, const float* cos, const float* sin);
  void (*write_kv)(const float* k, const float* v, int64_t dim, int64_t value_dim, int64_t offset, bool bf16,
                   void* k_block, void* v_block);
  int64_t (*query_tile)(int64_t m, bool bf16);  // how many of m query rows make a tile
  int64_t (*attend_workspace)(int64_t m, int64_t dim);
  void (*attend)(const AttendJob&, int64_t word_begin, int64_t word_end, const SoftmaxState&);
  void (*merge)(int64_t m, int64_t value_dim, const SoftmaxState& into, const SoftmaxState& part);
  void (*gate_row)(const SwarmGating& how, const float* x, int64_t width, float* y);
  void (*route_row)(const SwarmRouting& how, const float* correction, int64_t experts, float* logits, float* work,
                    int64_t* index, float* scores);
  void (*convolve)(const float* const* taps, const SwarmConvolution& how, int64_t begin, int64_t end, float* y);
  void (*prepare_recurrence)(const SwarmRecurrence& how, int64_t row, int64_t keys, float* query, float* key,
                             float* decay);
  void (*recur)(const RecurrenceJob& job, int64_t head, int64_t column, float* slots);
  // One group of a row; y may be x.
  void (*norm_gated)(const SwarmGatedNorm& how, const float* x, const float* gate, const float* weight, float* y);
  int64_t state_columns;  // of one call of recur
};

}  // namespace swarm
