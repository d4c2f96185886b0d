"""GGUF files of every architecture that is read: transformers' tokens and logits, and the tensors they were made of."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_converter import convert
from tiny_models import hf_greedy, hf_logits
from zoo.compare import Pieces, text
from zoo.shrink import tiny_config
from zoo.weights import random_model

from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.open import open_model

_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_MSCALE = {"mscale": 0.7, "mscale_all_dim": 0.7}
_LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.75,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"sliding_window": None}),
    "qwen2moe": ("qwen2_moe", {}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True, "sliding_window": None}),
    "gpt-oss": ("gpt_oss", {"rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}}),
    "deepseek v2": ("deepseek_v2", {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"}),
    "deepseek v2 lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": {**_YARN, **_MSCALE}},
    ),
    "deepseek v3": ("deepseek_v3", {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 7, "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3, window": ("phi3", {}),
    "phi3, longrope": (
        "phi3", {"sliding_window": None, "rope_parameters": _LONG, "original_max_position_embeddings": 128},
    ),
    "granite": (
        "granite",
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 4.0},
    ),
    "granitemoe": ("granitemoe", {"attention_multiplier": 0.2, "residual_multiplier": 0.4}),
    "granitemoe, shared": ("granitemoeshared", {"shared_intermediate_size": 40, "attention_multiplier": 0.2}),
    "glm4": ("glm4", {"attention_bias": True}),
    "glm4moe": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5}),
    "olmo2": ("olmo2", {"head_dim": None}),
    "olmo3": ("olmo3", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
    "olmoe": ("olmoe", {"rms_norm_eps": 1e-5}),
    "smollm3": ("smollm3", {}),
    "llama4": ("llama4_text", {"attention_chunk_size": 8192, "rope_parameters": _LLAMA3}),
    "minimax-m2": ("minimax_m2", {"rope_parameters": _HALF}),
}  # fmt: skip


def tiny(name: str) -> Any:
    kind, changes = CASES[name]
    changes = dict(changes)
    if changes.get("head_dim", 0) is None:
        del changes["head_dim"]
    return random_model(tiny_config(kind, **changes))


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logits_are_those_of_the_original(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    words = text(60, 3, 256)
    with closing(open_model(str(convert(model, tmp_path / "m.gguf")))) as source:
        pieces = Pieces(source)
        layers = source.config.num_layers
        ours = pieces.chain((layers // 2,)).run(StepRequest(b"a", 0, len(words)), words)
        theirs = hf_logits(model, words)
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-4
        expected = hf_greedy(model, words[:40], 12)
        assert pieces.chain((1, layers - 1)).greedy(words[:40], 12) == expected
