"""Ends at home for models that run on transformers' own layers: some layers at each end, and what is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from memory_swarm import cut, memory_swarm
from recovery_swarm import LINK, answer_with
from scripted_drafters import Oracle
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import virtual_time

from swarm.errors import UsageError
from swarm_client.home.local_layers import foreign
from swarm_client.speculation.drafters.inline import InlineDrafter

LAYERS, TOKENS = 6, 24
PROMPT = list(range(3, 22))
KINDS: dict[str, dict[str, Any]] = {
    "gpt_neox": {},  # embedding and head apart, one fused projection
    "gpt2": {"n_embd": 96, "n_layer": 6, "n_head": 6, "n_positions": 256, "tie_word_embeddings": True},  # positions
}


@cache
def model(kind: str) -> Any:
    return tiny_model(kind, **KINDS[kind])


@pytest.mark.parametrize(("local", "strategy"), [("1:1", "tree"), ("2:1", "sequential"), ("1:3", "pipedec")])
@pytest.mark.parametrize("kind", KINDS)
@virtual_time
async def test_tokens_are_those_of_transformers_also_when_a_hop_dies(kind: str, local: str, strategy: str) -> None:
    truth = hf_greedy(model(kind), PROMPT, TOKENS)
    source = ModelTensors(model(kind))
    assert not source.config.has_fast_path

    def draft() -> InlineDrafter:
        return InlineDrafter(Oracle(truth, 0.7))

    async with (
        memory_swarm(source, cut(LAYERS, 3) * 2, LINK) as swarm,
        swarm.client(make_drafter=draft, local_layers=local) as client,
    ):
        answer, _, _ = await answer_with(
            client, lambda chain: swarm.kill(foreign(chain.hops)[0].peer), 9, PROMPT, decoding=strategy
        )
    assert list(answer.token_ids) == truth
    assert len(answer.repairs) == 1


@pytest.mark.parametrize("local", ["0:0", "1:0", "0:2"])
@virtual_time
async def test_an_end_without_a_layer_is_refused_with_what_to_give_instead(local: str) -> None:
    source = ModelTensors(model("gpt_neox"))
    async with memory_swarm(source, cut(LAYERS, 3)) as swarm:
        with pytest.raises(UsageError, match="one at least at each end: --local-layers 1:1"):
            async with swarm.client(local_layers=local):
                """Never."""
