"""The families that people want served, by the name under which `make models` lists them."""

from __future__ import annotations

from typing import Any

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope", "rope_theta": 1000.0, "factor": 2.0, "original_max_position_embeddings": 128,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "long_factor": [1.5, 1.6, 2.0, 2.2, 2.4, 2.6, 3.0, 4.0],
}  # fmt: skip


def _rope(kind: str, **values: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **values}}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, linear rope": ("llama", _rope("linear", factor=3.0)),
    "llama, dynamic rope": ("llama", _rope("dynamic", factor=3.0)),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, longrope": ("llama", {"rope_parameters": LONG}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, partial rotary": ("llama", _rope("default", partial_rotary_factor=0.5)),
    "mistral, window": ("mistral", {}),
    "qwen2, window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, window": ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 4}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "gpt_oss": ("gpt_oss", {}),
    "mixtral": ("mixtral", {}),
    "phimoe": ("phimoe", {}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v32": ("deepseek_v32", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", {}),
    "glm_moe_dsa": ("glm_moe_dsa", {"indexer_types": ["full", "shared"] * 2}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {}),
    "gemma3n": ("gemma3n_text", {}),
    "gemma3n, shared keys": ("gemma3n_text", {"num_kv_shared_layers": 2,
                                              "activation_sparsity_pattern": [0.7, 0.0, 0.0, 0.5]}),
    "gemma4": ("gemma4_text", {}),
    "gemma4, per-layer inputs": ("gemma4_text", {"hidden_size_per_layer_input": 16}),
    "gemma4, shared keys": ("gemma4_text", {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2,
                                            "use_double_wide_mlp": True}),
    "llama4": ("llama4_text", {}),
    "minimax": ("minimax", {}),
    "minimax_m2": ("minimax_m2", {}),
    "kimi_linear": ("kimi_linear", {}),
    "mimo_v2": ("mimo_v2_flash", {}),
    "granite": ("granite", {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0,
                            "attention_multiplier": 0.3}),
    "granitemoehybrid": ("granitemoehybrid", {}),
    "nemotron_h": ("nemotron_h", {}),
    "lfm2": ("lfm2", {}),
    "lfm2_moe": ("lfm2_moe", {}),
    "jamba": ("jamba", {}),
    "bamba": ("bamba", {}),
    "olmo_hybrid": ("olmo_hybrid", {}),
    "falcon": ("falcon", {}),
    "falcon, alibi": ("falcon", {"alibi": True, "new_decoder_architecture": False}),
    "bloom": ("bloom", {}),
    "falcon, heads apart": ("falcon", {"alibi": True, "new_decoder_architecture": False, "multi_query": False}),
    "gptj": ("gptj", {}),
    "codegen": ("codegen", {}),
    "gpt_neo, window": ("gpt_neo", {}),
    "mpt": ("mpt", {}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "cohere2": ("cohere2", {}),
    "smollm3": ("smollm3", {}),
    "olmo3": ("olmo3", {}),
}  # fmt: skip
