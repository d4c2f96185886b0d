"""The lean span against transformers: the same greedy tokens, however the layers are cut and the rows are batched."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tiny_models import Chain, ModelTensors, hf_greedy, tiny_model

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-head": ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}}),
    "qwen2-yarn": (
        "qwen2",
        {"rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 24,
        }},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 12}),
}  # fmt: skip
CUTS = [(), (2,), (1, 4), (1, 2, 3, 5)]


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(131) for _ in range(length)]


@pytest.mark.parametrize("family", FAMILIES)
def test_chained_spans_generate_what_transformers_does(family: str) -> None:
    kind, changes = FAMILIES[family]
    model = tiny_model(kind, **changes)
    source = ModelTensors(model)
    assert source.config.lean
    prompt = prompt_of(37, 1)
    expected = hf_greedy(model, prompt, 12)
    assert len(set(expected)) > 3  # a model that says one word proves little
    for cuts, chunks in zip(CUTS, [(), (37,), (1, 16, 20), (5, 5, 27)], strict=True):
        assert Chain(source, cuts).greedy(b"a", prompt, 12, chunks) == expected
