// The C structs Python fills in (cpu/binding.py mirrors them field by field) and the status codes it gets back.
#pragma once
#include <cstdint>

extern "C" {

enum SwarmStatus : int32_t {
  SWARM_OK = 0,
  SWARM_NO_MEMORY = 1,
  SWARM_UNKNOWN_ISA = 2,
  // Invalid plans, found by swarm_check_plan before any kernel runs.
  SWARM_BAD_SEQUENCE = 10,
  SWARM_BAD_CONTEXT_LEN = 11,
  SWARM_BAD_SLOT = 12,
  SWARM_BAD_BLOCK = 13,
  SWARM_BAD_TREE_BLOCK = 14,
  SWARM_BAD_TREE_MASK = 15,
  SWARM_BAD_COPY = 16,
  SWARM_BAD_EXPERT = 17,
  SWARM_BAD_STATE_ROWS = 18,
};

enum SwarmFormat : int32_t {
  SWARM_FP32 = 0,
  SWARM_BF16 = 1,
  SWARM_INT8 = 2,
  SWARM_INT4 = 3,
  SWARM_MXFP4 = 4,
  SWARM_IQ4_NL = 5,
  SWARM_IQ4_XS = 6,
  SWARM_NF4 = 7,
  SWARM_FP8 = 8,
};

// Weights packed in blocks of 16 outputs, zero-padded: fp32 [out/16][in][16]; bf16 [out/16][in/2][16][2], `in` even;
// int8 [out/16][in/4][16][4], `in` rounded up to a multiple of 4, each plus 128; int4 [out/16][in/32] of int4.h's
// Int4Block, `in` rounded up to a multiple of 32; fp8 [out/16] of fp8.h's Fp8Codes::block_bytes(in), `in` a multiple of 4;
// the others [out/16] of codebook.h's Codes::block_bytes(in), `in` a multiple of 32, of 64 for NF4, of 256 for IQ4_XS.
struct SwarmLinear {
  const void* weight;
  const float* scale;  // int8: scale of each output, [out rounded up to 16]
  const float* bias;   // [out rounded up to 16] or null
  int64_t in, out;
  SwarmFormat format;
  int32_t unused;
};

// Of the gates of an MLP: layer_weights.Activation.
enum SwarmActivation : int32_t { SWARM_SILU = 0, SWARM_GELU_TANH = 1, SWARM_GELU = 2 };

// How scores become weights, and which keys a row at position p sees: those at distance < window, or of chunk p / chunk.
struct SwarmScoring {
  const float* sinks;     // a score of each query head that has no value, or null
  // Null, or [rows, chosen_words], whose bit j of word w of a row is set where it sees committed key 64 w + j.
  const uint64_t* chosen;
  int64_t chosen_words;
  int64_t window, chunk;  // at most one is not 0
  float scale, softcap;   // softcap 0: none
};

struct SwarmMixture;

// layer_weights.LayerWeights. Norms may be null. gate_up and down: of its MLP, unless it has a mixture of experts.
struct SwarmLayer {
  SwarmLinear qkv, o, gate_up, down;
  const SwarmMixture* mixture;  // or null
  const float *attn_norm, *attn_post_norm, *mlp_norm, *mlp_post_norm;  // [hidden]
  const float *q_norm, *k_norm;  // [head_dim], or [heads * head_dim] and [kv_heads * head_dim]
  SwarmScoring scoring;
  int64_t heads, kv_heads, head_dim;
  int32_t norm_is_whole;  // q_norm and k_norm: over all heads at once
  int32_t rope;           // rotary table, -1: none
  SwarmActivation activation;
  float eps, residual_scale;
  int32_t rounds_to_bf16;  // hidden states, after the layer
};

// experts.Gating: what an expert does between its two linear layers. g and u are the halves of the first one's outputs,
// gates first; without gates x are all of them.
enum SwarmGatingKind : int32_t {
  SWARM_SWIGLU = 0,        // g = min(g, limit), u = clamp(u, -limit, limit): g sigmoid(alpha g) (u + shift)
  SWARM_GEGLU_TANH = 1,    // gelu(g) u, by tanh
  SWARM_RELU_SQUARED = 2,  // max(x, 0)^2
};
struct SwarmGating {
  SwarmGatingKind kind;
  float alpha, limit, shift;
};

// A mixture of experts: each has a linear layer hidden -> intermediate (twice that with gates), and one back.
struct SwarmExperts {
  const SwarmLinear *first, *second;  // [experts]
  int64_t experts, hidden, intermediate;
  SwarmGating gating;
};

// routing.Scores, and routing.Routing.
enum SwarmScores : int32_t { SWARM_SOFTMAX = 0, SWARM_SIGMOID = 1, SWARM_SOFTMAX_OF_CHOSEN = 2 };
struct SwarmRouting {
  SwarmScores scores;
  int32_t normalized;
  float epsilon, scale;
  int64_t chosen, groups, used_groups;
};

// layer_weights.Mixture. Weights of a shared expert or its gate that it does not have are null.
struct SwarmMixture {
  SwarmLinear router;  // hidden -> experts
  SwarmLinear shared_gate_up, shared_down, shared_gate;
  const float* correction;  // [experts] or null
  SwarmRouting routing;
  SwarmExperts experts;
  SwarmActivation shared_activation;
  int32_t unused;
};

// One layer's KV cache: keys [blocks][kv_heads][dim][KV_BLOCK], values [blocks][kv_heads][KV_BLOCK][value_dim].
struct SwarmCache {
  void *k, *v;
  int64_t blocks, kv_heads, dim, value_dim;
  int32_t bf16;
  int32_t latent;  // if not 0, attention takes no values from v: they are the first `latent` numbers of the keys
};

// swarm_kernels.batch.AttentionMetadata, all arrays contiguous.
struct SwarmPlan {
  int64_t rows, sequences, max_blocks, max_tree_blocks, mask_words, copies;
  const int64_t* positions;
  const int32_t *sequence_index, *context_lens;
  const int64_t* slot_mapping;
  const int32_t *block_tables, *tree_block_tables;
  const uint64_t* tree_mask;
  const int64_t *copy_from, *copy_to;
  const int32_t* tree_positions;  // [sequences, max_tree_blocks * KV_BLOCK]
};

// recurrence.StateRows: row r continues the state that row parent[r] left, or, where that is negative, start
// -1 - parent[r]. order [rows]: every row, after its parent. The state after row saved_row[i] is kept as number i.
struct SwarmStateRows {
  int64_t rows, starts, saves;
  const int32_t *order, *parent, *saved_row;
};

// recurrence.Convolution. A state holds the last `taps` inputs, [channels][taps].
struct SwarmConvolution {
  const float *weight, *bias;  // [taps][channels]; [channels] or null
  int64_t channels, taps;      // at most MAX_TAPS
  int32_t silu, rounds_to_bf16;
};

// recurrence.Recurrence of rows: query and key [rows][key_heads][key_dim], value [rows][heads][value_dim], each with its
// row stride; decay, as logarithms, [rows][heads] or [rows][heads][key_dim]; beta [rows][heads] or null, skip [heads] or
// null; out [rows][heads][value_dim]. A state is [heads][key_dim][value_dim], or, with values_first, its transpose.
struct SwarmRecurrence {
  const float *query, *key, *value, *decay, *beta, *skip;
  float* out;
  int64_t query_row, key_row, value_row;
  int64_t key_heads, heads, key_dim, value_dim;
  float scale, eps;  // of queries; of the norm
  int32_t corrects, normalizes, decay_by_key, values_first;
};

// gated_norm.GatedNorm: x and gate [rows][groups][size], gates with their row stride; weight [size] or, with
// weight_by_group, [groups][size]. `rounds`: to bf16 what is normed, before and after it is multiplied by the weight.
struct SwarmGatedNorm {
  const float *weight;
  int64_t groups, size;
  float eps;
  int32_t weight_by_group, gate_first, sigmoid, rounds;
};

}  // extern "C"
