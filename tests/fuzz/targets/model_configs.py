"""config.json: a config with a rotary embedding and a fingerprint, or a ModelError."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch

from swarm.errors import ModelError
from swarm_kernels.draft.file import DraftMetadata
from swarm_kernels.models.hf_config import model_config
from swarm_kernels.models.source import fingerprint
from swarm_kernels.models.tensor_shapes import check_shapes
from swarm_kernels.runtime.rope import RopeTable

INSTRUMENT = ("swarm_kernels.models.hf_config", "swarm_kernels.models.tensor_shapes", "swarm_kernels.runtime.rope")


def run(data: bytes) -> None:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(parsed, dict):
        return
    try:
        config = model_config(parsed, parsed)
        fingerprint(config, [], lambda _name, _length: np.zeros(0, np.uint8))
        if config.head_dim <= 1 << 10 and config.has_fast_path:
            RopeTable(config.rope, config.head_dim, min(config.context_length, 64), torch.device("cpu")).at(
                torch.arange(2), 80
            )
        check_shapes(config, {}, "a folder")
    except ModelError:
        return


def seeds() -> Iterator[bytes]:
    base: dict[str, Any] = {
        "model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 6,
        "intermediate_size": 8, "rms_norm_eps": 1e-5, "eos_token_id": [1, 2], "tie_word_embeddings": True,
        "max_position_embeddings": 64, "num_key_value_heads": 1, "hidden_act": "silu", "head_dim": 4,
    }  # fmt: skip
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for changes in (
        {"rope_theta": 1e5, "rope_scaling": {**llama3, "original_max_position_embeddings": 32}},
        {"model_type": "qwen2", "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 3}},
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
        {"model_type": "mistral", "rope_scaling": {"type": "dynamic", "factor": 2.0}, "partial_rotary_factor": 0.5},
        {"model_type": "gpt2", "n_embd": 8, "rope_scaling": {"type": "linear", "factor": 2}},
    ):  # fmt: skip
        yield msgspec.json.encode({**base, **changes})
    yield msgspec.json.encode(DraftMetadata("m", "h", 1, 2))
