"""The GGUF architectures that are read: a config and the names of the tensors for each.

Names are llama.cpp's (`gguf.MODEL_TENSORS`, a test compares) and those of Hugging Face's checkpoints. What llama.cpp's
converter (https://github.com/ggml-org/llama.cpp, `conversion/`) permutes, shifts, splits or transposes is undone by the
rule's builder.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm_kernels.models.gguf_types import configs, layers, mixtures
from swarm_kernels.models.gguf_types.architecture import Architecture, Rule, linear, rule
from swarm_kernels.models.gguf_types.layers import ATTENTION, EDGES, GEMMA_EDGES, HEAD_NORMS, MLP, NORMS
from swarm_kernels.models.gguf_types.views import (
    alternating_biases,
    gate_and_up,
    middle_dimension,
    stacked_rows,
    transposed_experts,
    whole,
)

_AFTER = [
    rule("post_attention_norm.weight", "post_attention_layernorm.weight"),
    rule("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
]
_SANDWICH = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA3 = _SANDWICH | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA1 = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_W = ("w1", "w3", "w2")
_GPT_OSS = [
    *ATTENTION,
    rule("attn_norm.weight", "input_layernorm.weight"),
    rule("post_attention_norm.weight", "post_attention_layernorm.weight"),
    rule("attn_sinks.weight", "self_attn.sinks"),
    *linear("ffn_gate_inp", "mlp.router"),
    Rule(
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"), "mlp.experts.gate_up_proj",
        gate_and_up("num_local_experts", transposed=True, alternating=True),
    ),
    Rule(("ffn_gate_exps.bias", "ffn_up_exps.bias"), "mlp.experts.gate_up_proj_bias", alternating_biases),
    rule("ffn_down_exps.weight", "mlp.experts.down_proj", transposed_experts("num_local_experts")),
    rule("ffn_down_exps.bias", "mlp.experts.down_proj_bias"),
]  # fmt: skip
_LLAMA4 = [
    *ATTENTION,
    *NORMS,
    *(Rule(each.sources, each.target.replace("mlp.", "feed_forward."), each.build) for each in MLP),
    rule("ffn_gate_inp.weight", "feed_forward.router.weight"),
    Rule(
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"), "feed_forward.experts.gate_up_proj",
        gate_and_up("num_local_experts", transposed=True),
    ),
    rule("ffn_down_exps.weight", "feed_forward.experts.down_proj", transposed_experts("num_local_experts")),
    *layers.shared_expert("feed_forward.shared_expert"),
]  # fmt: skip
_GRANITE_MOE = [
    *layers.INTERLEAVED_ATTENTION,
    *NORMS,
    rule("ffn_gate_inp.weight", "block_sparse_moe.router.layer.weight"),
    Rule(
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"), "block_sparse_moe.input_linear.weight",
        gate_and_up("num_local_experts"),
    ),
    rule("ffn_down_exps.weight", "block_sparse_moe.output_linear.weight"),
    Rule(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), "shared_mlp.input_linear.weight", stacked_rows),
    rule("ffn_down_shexp.weight", "shared_mlp.output_linear.weight"),
]  # fmt: skip
_GLM4 = [
    *ATTENTION,
    *NORMS,
    rule("post_attention_norm.weight", "post_self_attn_layernorm.weight"),
    rule("post_ffw_norm.weight", "post_mlp_layernorm.weight"),
    rule("ffn_up.weight", "mlp.gate_up_proj.weight"),
    rule("ffn_down.weight", "mlp.down_proj.weight"),
]
_GLM4_MOE = [
    *ATTENTION,
    *HEAD_NORMS,
    rule("attn_norm.weight", "input_layernorm.weight"),
    rule("post_attention_norm.weight", "post_attention_layernorm.weight"),
    *MLP,
    *layers.experts("n_routed_experts"),
    *layers.correction_bias("mlp.gate.e_score_correction_bias"),
    *layers.shared_expert("mlp.shared_experts"),
]
_DEEPSEEK = [
    *layers.latent_attention(),
    *NORMS,
    *MLP,
    *layers.experts("n_routed_experts"),
    *layers.correction_bias("mlp.gate.e_score_correction_bias"),
    *layers.shared_expert("mlp.shared_experts"),
]
_PHI3 = [
    *NORMS,
    *linear("attn_qkv", "self_attn.qkv_proj"),
    *linear("attn_output", "self_attn.o_proj"),
    rule("ffn_up.weight", "mlp.gate_up_proj.weight"),
    rule("ffn_down.weight", "mlp.down_proj.weight"),
]
_QWEN2_MOE = [
    *ATTENTION,
    *NORMS,
    *layers.experts("num_experts"),
    *layers.shared_expert("mlp.shared_expert"),
    *layers.gate_of_shared_expert(),
]
_MINIMAX_M2 = [
    *ATTENTION,
    *HEAD_NORMS,
    *NORMS,
    *layers.experts("num_local_experts", "block_sparse_moe", _W),
    *layers.correction_bias("block_sparse_moe.e_score_correction_bias"),
]
_PHI_MOE = [
    *ATTENTION,
    *linear("attn_norm", "input_layernorm"),
    *linear("ffn_norm", "post_attention_layernorm"),
    *layers.experts("num_local_experts", "block_sparse_moe", _W),
]
_PHI_MOE_EDGES = {**EDGES, "output.bias": ("lm_head.bias", whole), "output_norm.bias": ("model.norm.bias", whole)}
_MIMO_V2 = [
    *ATTENTION,
    *NORMS,
    rule("attn_sinks.weight", "self_attn.attention_sink_bias"),
    *MLP,
    *layers.experts("n_routed_experts"),
    *layers.correction_bias("mlp.gate.e_score_correction_bias"),
]
_LLAMA = [*layers.INTERLEAVED_ATTENTION, *NORMS, *MLP, *layers.experts("num_local_experts", "block_sparse_moe", _W)]

_LFM2_EDGES = {name: edge for name, edge in EDGES.items() if name != "output_norm.weight"} | {
    "token_embd_norm.weight": ("model.embedding_norm.weight", whole)
}
_LFM2 = [
    *(Rule(each.sources, each.target.replace(".o_proj", ".out_proj"), each.build) for each in ATTENTION),
    rule("attn_q_norm.weight", "self_attn.q_layernorm.weight"),
    rule("attn_k_norm.weight", "self_attn.k_layernorm.weight"),
    rule("attn_norm.weight", "operator_norm.weight"),
    rule("ffn_norm.weight", "ffn_norm.weight"),
    rule("shortconv.conv.weight", "conv.conv.weight", middle_dimension),
    rule("shortconv.in_proj.weight", "conv.in_proj.weight"),
    rule("shortconv.out_proj.weight", "conv.out_proj.weight"),
    rule("ffn_gate.weight", "feed_forward.w1.weight"),
    rule("ffn_up.weight", "feed_forward.w3.weight"),
    rule("ffn_down.weight", "feed_forward.w2.weight"),
]
_LFM2_MOE = [*layers.experts("num_experts", "feed_forward", _W), *layers.correction_bias("feed_forward.expert_bias")]

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(configs.llama, tuple(_LLAMA), EDGES),
    "mistral": Architecture(configs.llama, tuple(_LLAMA), EDGES),
    "qwen2": Architecture(configs.qwen2, (*ATTENTION, *NORMS, *MLP), EDGES),
    "qwen3": Architecture(configs.qwen3, (*ATTENTION, *HEAD_NORMS, *NORMS, *MLP), EDGES),
    "gemma": Architecture(configs.gemma, (*ATTENTION, *MLP, *layers.gemma_norms(_GEMMA1)), GEMMA_EDGES),
    "gemma2": Architecture(configs.gemma2, (*ATTENTION, *MLP, *layers.gemma_norms(_SANDWICH)), GEMMA_EDGES),
    "gemma3": Architecture(configs.gemma3, (*ATTENTION, *MLP, *layers.gemma_norms(_GEMMA3)), GEMMA_EDGES),
    "phi3": Architecture(configs.phi3, tuple(_PHI3), EDGES),
    "glm4": Architecture(configs.glm4, tuple(_GLM4), EDGES),
    "seed_oss": Architecture(configs.seed_oss, (*ATTENTION, *layers.SEED_NORMS, *MLP), EDGES),
    "olmo2": Architecture(configs.olmo2, (*ATTENTION, *HEAD_NORMS, *_AFTER, *MLP), EDGES),
    "smollm3": Architecture(configs.smollm3, (*layers.INTERLEAVED_ATTENTION, *NORMS, *MLP), EDGES),
    "granite": Architecture(configs.granite, (*layers.INTERLEAVED_ATTENTION, *NORMS, *MLP), EDGES),
    "granitemoe": Architecture(mixtures.granite_moe, tuple(_GRANITE_MOE), EDGES),
    "qwen2moe": Architecture(mixtures.qwen2_moe, tuple(_QWEN2_MOE), EDGES),
    "qwen3moe": Architecture(
        mixtures.qwen3_moe, (*ATTENTION, *HEAD_NORMS, *NORMS, *layers.experts("num_experts")), EDGES
    ),
    "olmoe": Architecture(mixtures.olmoe, (*ATTENTION, *HEAD_NORMS, *NORMS, *layers.experts("num_experts")), EDGES),
    "gpt-oss": Architecture(mixtures.gpt_oss, tuple(_GPT_OSS), EDGES),
    "llama4": Architecture(mixtures.llama4, tuple(_LLAMA4), EDGES),
    "minimax-m2": Architecture(mixtures.minimax_m2, tuple(_MINIMAX_M2), EDGES),
    "phimoe": Architecture(mixtures.phi_moe, tuple(_PHI_MOE), _PHI_MOE_EDGES),
    "mimo2": Architecture(mixtures.mimo_v2, tuple(_MIMO_V2), EDGES),
    "glm4moe": Architecture(mixtures.glm4_moe, tuple(_GLM4_MOE), EDGES),
    "lfm2": Architecture(configs.lfm2, tuple(_LFM2), _LFM2_EDGES),
    "lfm2moe": Architecture(mixtures.lfm2_moe, (*_LFM2, *_LFM2_MOE), _LFM2_EDGES),
    "deepseek2": Architecture(mixtures.deepseek2, tuple(_DEEPSEEK), EDGES),
}
"""By llama.cpp's name."""
