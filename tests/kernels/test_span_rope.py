"""Rotary tables against transformers' own, for every scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from swarm.errors import CorruptModel, UnsupportedModel
from swarm_kernels.models.config import RopeConfig
from swarm_kernels.models.hf_config import model_config
from swarm_kernels.runtime.rope import RopeTable, RopeTables

CONTEXT = 128
FACTORS = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 2.5, 3.5]
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn with all its words": {
        "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16, "beta_slow": 2, "mscale": 1.2,
        "mscale_all_dim": 0.7, "truncate": False,
    },
    "longrope": {
        "original_max_position_embeddings": CONTEXT, "factor": 2.0, "short_factor": FACTORS, "long_factor": FACTORS,
    },
    "longrope with its factor": {
        "original_max_position_embeddings": CONTEXT, "attention_factor": 1.3, "short_factor": FACTORS,
        "long_factor": FACTORS[::-1],
    },
    "yarn with its factor": {"factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_are_transformers(name: str) -> None:
    parameters = {"rope_type": name.split()[0], "rope_theta": 1000.0, **SCALINGS[name]}
    hf = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=CONTEXT, rope_parameters=parameters)
    ours = model_config({**hf.to_dict(), "num_hidden_layers": 2})
    table = RopeTable(ours.rope, ours.head_dim, CONTEXT, torch.device("cpu"))
    positions = torch.tensor([0, 1, 17, 31, 32, 100, CONTEXT - 1])
    cos, sin = table.at(positions, CONTEXT - 1)
    theirs = LlamaRotaryEmbedding(hf)(torch.zeros(1), positions[None])
    assert torch.allclose(cos, theirs[0][0], atol=1e-6)
    assert torch.allclose(sin, theirs[1][0], atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"short_factor": None},
        {"short_factor": FACTORS[1:]},
        {"short_factor": [*FACTORS[1:], "many"]},
        {"short_factor": [*FACTORS[1:], 0]},
        {"short_factor": [FACTORS]},
        {"short_factor": [10**400] * 8},
        {"original_max_position_embeddings": -5},
        {"original_max_position_embeddings": "all"},
        {"factor": "twice"},
    ],
)
def test_longrope_that_cannot_be_is_corrupt(changes: dict[str, Any]) -> None:
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": FACTORS, **changes}
    with pytest.raises(CorruptModel, match="rope scaling"):
        RopeTables((RopeConfig(), RopeConfig(1e3, scaling)), 16, CONTEXT, torch.device("cpu"))


def test_tables_of_different_widths_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="different numbers of dimensions"):
        RopeTables((RopeConfig(), RopeConfig(dim=8)), 16, CONTEXT, torch.device("cpu"))


def test_beyond_the_context_a_row_takes_the_length_that_ends_with_it() -> None:
    """transformers takes the longest row of a batch; for that row alone both agree."""
    parameters = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}
    hf = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=CONTEXT, rope_parameters=parameters)
    ours = model_config({**hf.to_dict(), "num_hidden_layers": 2})
    table = RopeTable(ours.rope, ours.head_dim, CONTEXT, torch.device("cpu"))
    for position in (CONTEXT, 3 * CONTEXT):
        cos, _ = table.at(torch.tensor([position]), position)
        theirs, _ = LlamaRotaryEmbedding(hf)(torch.zeros(1), torch.tensor([[position]]))
        assert torch.allclose(cos, theirs[0], atol=2e-5)


def test_the_table_grows_and_keeps_its_rows() -> None:
    hf = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=CONTEXT)
    ours = model_config({**hf.to_dict(), "num_hidden_layers": 2})
    table = RopeTable(ours.rope, ours.head_dim, CONTEXT, torch.device("cpu"))
    first = table.at(torch.arange(CONTEXT), CONTEXT - 1)[0].clone()
    table.at(torch.tensor([5000]), 5000)
    assert torch.equal(table.at(torch.arange(CONTEXT), CONTEXT - 1)[0], first)
