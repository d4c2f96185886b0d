"""One client's flood of work costs an honest one no more than a fair share of the devices, and never a token."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from flood_swarm import MAX_TOKENS, TREES, Attacker, Flood, Honest, costly_swarm, honest_rate
from memory_swarm import cut
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import virtual_time

SECONDS = 1.0
PROMPT = [3, 5, 7]


def model() -> tuple[Any, ModelTensors]:
    made = tiny_model("llama", num_hidden_layers=12, max_position_embeddings=2 * MAX_TOKENS)
    return made, ModelTensors(made)


async def beside(source: ModelTensors, floods: list[Attacker] | None, swarm: Any) -> Honest:
    async with AsyncExitStack() as stack:
        for attacker in floods or ():
            await stack.enter_async_context(attacker.run())
        await asyncio.sleep(1.0)
        return await honest_rate(swarm, SECONDS, prompt=PROMPT, tokens=16)


@pytest.mark.parametrize(("flood", "identities"), [(TREES, 1)], ids=lambda value: getattr(value, "name", value))
@virtual_time
async def test_an_honest_client_keeps_its_share_and_its_tokens(flood: Flood, identities: int) -> None:
    """Its share is half of each node; it needs a third of each, so it should lose little. Held to half at least."""
    reference, source = model()
    async with costly_swarm(source, cut(12, 4, 8)) as swarm:
        alone = await beside(source, None, swarm)
    async with costly_swarm(source, cut(12, 4, 8)) as swarm:
        crowd = [Attacker(swarm, n, flood, 4 if identities == 1 else 1, "8.8.8.8") for n in range(identities)]
        flooded = await beside(source, crowd, swarm)
        assert sum(attacker.results for attacker in crowd) > 0, "nobody attacked"
    assert flooded.rate >= 0.5 * alone.rate
    assert set(flooded.answers or ()) == {tuple(hf_greedy(reference, PROMPT, 16))}
