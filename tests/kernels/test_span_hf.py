"""Decoders outside the fast path: transformers' layers, our attention, any slice; and those that must be rejected."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Chain, ModelTensors, hf_greedy, tiny_model

from swarm.errors import CorruptModel, ModelError, UnsupportedModel
from swarm.types import LayerSpan
from swarm_kernels.models.hf_config import model_config
from swarm_kernels.models.open import open_model
from swarm_kernels.runtime.load import load_span

MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 16},  # windows in most layers, the others without rotation
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "hidden_activation": "relu"},  # capped scores and logits
    "gpt2": {"n_embd": 96, "n_layer": 6, "n_head": 6, "n_positions": 256},  # learned positions
    "gpt_neox": {},  # parallel residual, fused projections
    "llama": {"hidden_act": "relu"},  # has a fast path but for its activation
    "phimoe": MOE,
    "olmo": {},
    "stablelm": {},  # part of each head is rotated
    "starcoder2": {"sliding_window": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_chained_spans_generate_what_transformers_does(kind: str) -> None:
    model = tiny_model(kind, **KINDS[kind])
    source = ModelTensors(model)
    assert not source.config.has_fast_path
    prompt = list(range(3, 40))
    expected = hf_greedy(model, prompt, 6)
    assert Chain(source, ()).greedy(b"a", prompt, 6) == expected
    assert Chain(source, (1, 4)).greedy(b"a", prompt, 6, (1, 20, 16)) == expected


@pytest.mark.parametrize("kind", ["mixtral", "gpt2"])
def test_weights_as_they_are_stored(kind: str, tmp_path: Path) -> None:
    """Checkpoints keep experts apart and may leave the prefix out; transformers' conversions put them in place."""
    model = tiny_model(kind, **(MOE if kind == "mixtral" else KINDS[kind]), tie_word_embeddings=kind == "gpt2")
    (model if kind == "mixtral" else model.transformer).save_pretrained(tmp_path)
    with closing(open_model(str(tmp_path))) as source:
        names = source.names()
        assert any("experts.3" in name for name in names) or "h.0.ln_1.weight" in names
        assert Chain(source, (2,)).greedy(b"a", [5, 6, 7], 6) == hf_greedy(model, [5, 6, 7], 6)


def test_only_its_own_layers_are_read_and_resident() -> None:
    source = ModelTensors(tiny_model("olmo"))
    span = load_span(source, LayerSpan(2, 4), torch.bfloat16)
    numbers = {name.split(".")[2] for name in source.read if ".layers." in name}
    assert numbers == {"2", "3"}
    assert not any("embed" in name or "lm_head" in name for name in source.read)
    assert 2 * span.layer_bytes == sum(source.nbytes(name) for name in source.names() if ".layers.2." in name)
    assert span.edge_bytes < 1000


UNSUPPORTED = {
    "mamba": ({}, "recurrent state of a known kind"),
}


@pytest.mark.filterwarnings("ignore")  # transformers' advice on optional packages
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_models_that_cannot_be_sliced_are_rejected_in_one_sentence(kind: str) -> None:
    changes, reason = UNSUPPORTED[kind]
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        load_span(ModelTensors(tiny_model(kind, **changes)), LayerSpan(1, 3), torch.float32)
    assert "\n" not in str(caught.value)


def test_a_kind_nobody_has_heard_of_and_missing_tensors() -> None:
    source = ModelTensors(tiny_model("olmo"))
    config = source.config
    source.config = model_config({**source.config.hf, "model_type": "no_such_kind"})
    with pytest.raises(UnsupportedModel, match="no_such_kind"):
        load_span(source, LayerSpan(0, 1), torch.float32)
    source.config = config
    source.forget("model.layers.1.mlp.up_proj.weight")
    load_span(source, LayerSpan(0, 1), torch.float32)
    with pytest.raises(CorruptModel, match=r"mlp\.up_proj"):
        load_span(source, LayerSpan(1, 2), torch.float32)
    source.replace("model.layers.2.mlp.up_proj.weight", torch.zeros(3, 3))
    with pytest.raises(ModelError, match="its config needs"):
        load_span(source, LayerSpan(2, 3), torch.float32)
