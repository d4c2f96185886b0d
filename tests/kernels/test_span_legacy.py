"""Decoders whose attention does not call transformers' interface, ALiBi among them, in spans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import ModelTensors
from zoo.compare import TOLERANCE, Pieces, compare, distance, text
from zoo.shrink import tiny_config
from zoo.weights import random_model

from swarm.types import LayerSpan
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.runtime.hf_legacy_attention import LEGACY
from swarm_kernels.runtime.load import load_span

SHARED_KEYS = {"alibi": True, "new_decoder_architecture": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("falcon", {}),
    "falcon, one key head": ("falcon", {"new_decoder_architecture": False}),
    "falcon, alibi": ("falcon", SHARED_KEYS),
    "falcon, alibi, heads apart": ("falcon", {**SHARED_KEYS, "multi_query": False}),
    "bloom": ("bloom", {}),
    "bloom, six heads": ("bloom", {"n_head": 6, "hidden_size": 96}),  # slopes of other than powers of two
    "gptj": ("gptj", {}),
    "codegen": ("codegen", {}),
    "gpt_neo, window": ("gpt_neo", {}),
    "mpt": ("mpt", {}),
    "mpt, six heads": ("mpt", {"n_heads": 6, "d_model": 96}),
}


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_trees_are_those_of_transformers(name: str) -> None:
    kind, changes = CASES[name]
    verdict = compare(tiny_config(kind, **changes), thorough=False)
    assert (verdict.word, verdict.refused, verdict.wrong) == ("equal", "", [])
    assert kind in LEGACY


@pytest.mark.parametrize("name", ["falcon, alibi, heads apart", "bloom", "mpt"])
def test_alibi_far_into_a_text(name: str) -> None:
    """Positions beyond those that bf16 holds exactly, in which transformers rounds Falcon's biases."""
    kind, changes = CASES[name]
    long = {"max_position_embeddings": 2048} if kind == "falcon" else {"max_seq_len": 2048} if kind == "mpt" else {}
    model = random_model(tiny_config(kind, **changes, **long))
    words = text(700, 3, 256)
    with torch.inference_mode():
        theirs = model(torch.tensor([words])).logits[0]
    chain = Pieces(ModelTensors(model)).chain((1,))
    chain.caches = [span.new_cache(1024) for span in chain.spans]
    for cache in chain.caches:
        cache.open(b"a", 1000)
    ours = [chain.run(StepRequest(b"a", start, 100), words[start : start + 100]) for start in range(0, 700, 100)]
    assert distance(torch.cat(ours), theirs) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_half_precision_passes_the_check_at_load(name: str, dtype: torch.dtype) -> None:
    kind, changes = CASES[name]
    span = load_span(ModelTensors(random_model(tiny_config(kind, **changes))), LayerSpan(1, 3), dtype)
    assert span.dtype == dtype
