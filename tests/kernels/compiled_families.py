"""What every family of the compiled path is tried for, mixtures of experts among them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import AutoConfig
from zoo.compare import compare
from zoo.shrink import LAYERS, tiny_config

from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.hf_config import model_config


def is_transformers(config: Any, *, thorough: bool = False, stored: dict[str, Any] | None = None) -> None:
    """On the compiled path and equal to transformers: layers, trees and logits; `thorough`: generations with cuts,
    kills and transfers. `stored`: its config.json, where that is not the config's own fields."""
    verdict = compare(config, thorough=thorough, stored=stored)
    assert verdict.word == "equal", (verdict.refused, verdict.wrong, verdict.edges)
    assert verdict.fast


def has_the_defaults_of_its_class(kind: str, **sizes: Any) -> ModelConfig:
    """A config.json that says nothing but sizes means what transformers' class makes of it. -> our config."""
    stored = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": LAYERS,
        "pad_token_id": None, **sizes,
    }  # fmt: skip
    derived = model_config(AutoConfig.for_model(kind, **stored).to_dict())
    stated = model_config({"model_type": kind, **stored})
    assert stated.decoder == derived.decoder
    assert stated.decoder is not None
    assert replace(stated, hf={}, eos_token_ids=()) == replace(derived, hf={}, eos_token_ids=())
    return stated


def goes_to_transformers(kind: str, changes: dict[str, Any], field: str) -> ModelConfig:
    """With these values of its config, because of `field`. -> our config."""
    config = model_config({**tiny_config(kind).to_dict(), **changes})
    assert config.beyond_fast_path.startswith(field)
    assert not config.has_fast_path
    return config
