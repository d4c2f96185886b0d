"""One client's flood of work costs an honest one no more than a fair share of the devices, and never a token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from flood_swarm import (
    KV_TOKENS,
    MAX_TOKENS,
    TOKENS,
    TREES,
    Attacker,
    Flood,
    Honest,
    OneQueue,
    costly_swarm,
    honest_rate,
)
from memory_swarm import cut
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import virtual_time

from swarm.net.security.identity import Identity
from swarm_hop.sharing.shares import SharePlaces

SECONDS = 1.0
SMALL_TREES = Flood("tree steps of 32 rows", 1, 31)
PROMPT = [3, 5, 7]
ME = Identity.from_seed((1000).to_bytes(32, "big")).peer  # the client of `memory_swarm` number 0


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


@pytest.mark.parametrize(
    "places",
    [
        lambda: SharePlaces(is_owner=lambda peer: peer == ME),
        lambda: SharePlaces(weight=lambda peer: 4.0 if peer == ME else 1.0),
    ],
    ids=["owner", "helper"],
)
@virtual_time
async def test_owners_and_helpers_have_more_among_many(places: Callable[[], SharePlaces]) -> None:
    """Beside eight others, each an address block of its own, and nobody is starved."""
    reference, source = model()
    rates = []
    for kind in (SharePlaces, places):
        async with costly_swarm(source, cut(12, 4, 8), kind) as swarm:
            crowd = [Attacker(swarm, n, SMALL_TREES, 1, f"8.8.{n}.8") for n in range(8)]
            got = await beside(source, crowd, swarm)
            assert set(got.answers or ()) == {tuple(hf_greedy(reference, PROMPT, 16))}
            assert all(attacker.results > 0 for attacker in crowd)
            rates.append(got.rate)
    equal, more = rates
    assert more > 1.2 * equal


@virtual_time
async def test_who_is_alone_has_the_whole_machine() -> None:
    """Shares hold nothing back from the only client: its flood gets as much done as with one queue for everybody."""
    _, source = model()
    done = []
    for kind in (OneQueue, SharePlaces):
        async with costly_swarm(source, cut(12, 4, 8), kind) as swarm:
            async with Attacker(swarm, 0, TREES, 4, "8.8.8.8").run() as only:
                await asyncio.sleep(20.0)
                done.append(only.results)
    assert done[1] >= 0.98 * done[0] > 20


@virtual_time
async def test_hoarded_memory_makes_room_and_answers_stay_right() -> None:
    """Two clients of one block reserve all memory of all nodes and use little; another is served, and its answers
    are right."""
    reference, source = model()
    async with costly_swarm(source, cut(12, 4, 8)) as swarm:
        async with AsyncExitStack() as stack:
            sessions = KV_TOKENS // MAX_TOKENS // 2
            hoarders = [Attacker(swarm, n, TOKENS, sessions, "8.8.8.8") for n in range(2)]
            for hoarder in hoarders:
                await stack.enter_async_context(hoarder.run())
            await asyncio.sleep(5.0)
            free = [node.engine.cache.free_tokens for node in swarm.nodes.values()]
            assert free == [0, 0, 0], "nothing is hoarded"
            honest = await honest_rate(swarm, SECONDS, prompt=PROMPT, tokens=16)
            assert all(hoarder.results > 0 for hoarder in hoarders)
    assert honest.rate > 0
    assert set(honest.answers or ()) == {tuple(hf_greedy(reference, PROMPT, 16))}
