"""What a client asks of its chains: neighbours of different operators, a first hop known for long, and another one for
each conversation; with ends at home, at trusted nodes, or nowhere."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import Any

import pytest
from memory_swarm import MemorySwarm, cut, memory_swarm
from recovery_swarm import LINK, answer_with
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import virtual_time, wall_clock

from swarm.errors import NoRoute
from swarm.planner.trust.evidence import PeerEvidence
from swarm.planner.trust.first_hop import DAY_S
from swarm.types import LayerSpan, PeerId
from swarm_client import GenerationResult, SwarmClient
from swarm_client.home.local_layers import foreign

LAYERS, TOKENS = 6, 16
PROMPT = [5, 9, 17, 40, 3, 77, 21]


@cache
def truth() -> list[int]:
    return hf_greedy(tiny_model("llama"), PROMPT, TOKENS)


@asynccontextmanager
async def swarm_of(*nodes: tuple[LayerSpan, str]) -> Any:
    """Nodes by span and region."""
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(memory_swarm(ModelTensors(tiny_model("llama")), [], LINK))
        for span, region in nodes:
            await swarm.add_node(span, region=region)
        yield swarm


def regions(swarm: MemorySwarm, answer: GenerationResult, of: Sequence[str]) -> list[str]:
    by_peer = dict(zip(swarm.peers, of, strict=True))
    return [by_peer[hop.peer] for hop in foreign(answer.chain.hops)]


PLACES = ("eu", "eu", "eu", "us", "asia", "us")


@pytest.mark.parametrize("local", ["none", "1:1"])
@virtual_time
async def test_neighbours_are_of_different_regions_also_after_a_repair(local: str) -> None:
    spans = [*cut(LAYERS, 2, 4), *cut(LAYERS, 2, 4)]
    async with (
        swarm_of(*zip(spans, PLACES, strict=True)) as swarm,
        swarm.client(apart="region", local_layers=local) as client,
    ):
        answer, _, _ = await answer_with(client, lambda chain: swarm.kill(foreign(chain.hops)[1].peer), 5, PROMPT)
        found = regions(swarm, answer, PLACES)
        assert list(answer.token_ids)[:TOKENS] == truth()
        assert answer.repairs
        assert all(a != b for a, b in itertools.pairwise(found))
        assert "no two neighbouring hops claim the same region (--apart)" in answer.explanation


@virtual_time
async def test_a_swarm_of_one_region_is_refused_with_what_to_relax() -> None:
    spans = zip(cut(LAYERS, 2, 4), ("eu", "EU", "eu "), strict=True)
    async with swarm_of(*spans) as swarm:
        async with swarm.client(apart="both") as client:
            with pytest.raises(NoRoute, match=r"one region, which --apart forbids.*--apart block"):
                await client.generate(PROMPT, max_new_tokens=4)
        async with swarm.client(1, apart="block") as client:  # in memory no address is public: all are unknown
            answer = await client.generate(PROMPT, max_new_tokens=TOKENS)
    assert list(answer.token_ids) == truth()
    assert "claim the same address block (--apart); unknown of" in answer.explanation


async def first(client: SwarmClient, prompt: Sequence[int]) -> tuple[PeerId, GenerationResult]:
    answer = await client.generate(prompt, max_new_tokens=4)
    return foreign(answer.chain.hops)[0].peer, answer


@pytest.mark.parametrize("ends", ["none", "1:1", "trusted"])
@virtual_time
async def test_each_conversation_begins_elsewhere_and_goes_on_where_it_began(ends: str) -> None:
    spans = [LayerSpan(0, 1), LayerSpan(5, 6), *cut(LAYERS, 3) * 3] if ends == "trusted" else cut(LAYERS, 3) * 3
    async with swarm_of(*((span, "") for span in spans)) as swarm:
        trust = tuple(swarm.peers[:2]) if ends == "trusted" else ()
        local = ends if ends != "trusted" else "none"
        async with swarm.client(vary_first=True, trust=trust, local_layers=local) as client:
            hops: list[PeerId] = []
            for begin in (5, 6, 7, 8):
                text = [begin, *PROMPT]
                _, answer = await first(client, text)
                stranger = next(hop.peer for hop in foreign(answer.chain.hops) if hop.peer not in trust)
                _, again = await first(client, [*text, *answer.token_ids, 9, 9])
                assert next(hop.peer for hop in foreign(again.chain.hops) if hop.peer not in trust) == stranger
                hops.append(stranger)
            assert all(a != b for a, b in itertools.pairwise(hops))


@virtual_time
async def test_where_there_is_no_other_first_hop_the_answer_comes_all_the_same() -> None:
    async with swarm_of(*((span, "") for span in cut(LAYERS, 3))) as swarm, swarm.client(vary_first=True) as client:
        one, _ = await first(client, PROMPT)
        other, _ = await first(client, [*PROMPT[::-1]])
    assert one == other


@pytest.mark.parametrize("kill", [False, True])
@virtual_time
async def test_a_chain_begins_with_whom_this_client_has_known_for_long(kill: bool) -> None:
    nodes = [(span, "") for span in cut(LAYERS, 3) * 4]
    async with swarm_of(*nodes) as swarm, swarm.client(known_first=True) as client:
        router = client._router
        assert router is not None
        heads = [peer for peer, node in swarm.nodes.items() if node.span.start == 0]
        now = wall_clock()
        for peer, days in zip(heads[1:], (9.0, 8.0, 0.0), strict=True):
            seen = PeerEvidence(first_at=now - days * DAY_S, last_at=now, sessions=4, rows=500.0)
            router.memory._known[peer] = seen
        peer, answer = await first(client, PROMPT)
        assert peer in heads[1:3]
        assert f"{peer[-6:]}, the first stranger, has served this client for" in answer.explanation
        if kill:
            answer, _, _ = await answer_with(client, lambda chain: swarm.kill(chain.peers[0]), 3, PROMPT)
            assert answer.repairs
            assert answer.chain.peers[0] in set(heads[1:3]) - {peer}
        else:
            router.memory._known = {p: replace_age(e, now) for p, e in router.memory.known.items()}
            young, answer = await first(client, PROMPT[::-1])
            assert young in heads
            assert "the first stranger, has" in answer.explanation


def replace_age(evidence: PeerEvidence, now: float) -> PeerEvidence:
    return PeerEvidence(first_at=now, last_at=now, sessions=evidence.sessions, rows=evidence.rows)
