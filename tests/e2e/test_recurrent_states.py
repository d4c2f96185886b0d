"""Layers with a recurrent state in whole swarms: drafts, prefix reuse, crashes and departures change no token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from memory_swarm import MemorySwarm, cut, memory_swarm
from recovery_swarm import LINK, TOKENS, answer_with, assert_clean, killer
from scripted_drafters import Oracle
from tiny_models import ModelTensors, hf_greedy
from virtual_clock import virtual_time
from zoo.shrink import tiny_config
from zoo.weights import random_model

from swarm.block_hash import HASH_BLOCK_TOKENS
from swarm.errors import NodeLeaving
from swarm.types import Chain
from swarm_client.speculation.drafters.inline import InlineDrafter

pytestmark = pytest.mark.slow
KINDS = ("lfm2", "qwen3_next", "granitemoehybrid")
SPANS = cut(4, 1, 2)


@cache
def model(kind: str) -> Any:
    return random_model(tiny_config(kind))


def prompt(length: int, seed: int = 8) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(length)]


@cache
def truth(kind: str, length: int) -> list[int]:
    return hf_greedy(model(kind), prompt(length), TOKENS)


def swarm_of(kind: str, replicas: int) -> Any:
    return memory_swarm(ModelTensors(model(kind)), SPANS * replicas, LINK)


def leaver(swarm: MemorySwarm, victim: int) -> Callable[[Chain], None]:
    def strike(chain: Chain) -> None:
        assert swarm.nodes[chain.peers[victim]].service.evict(NodeLeaving("this node leaves"), lambda span: True)

    return strike


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accuracy", [1.0, 0.6])
@virtual_time
async def test_drafts_change_no_token(kind: str, accuracy: float) -> None:
    expected = truth(kind, 37)

    def make_drafter() -> InlineDrafter:
        return InlineDrafter(Oracle(expected, accuracy))

    async with swarm_of(kind, 1) as swarm:
        for name, decoding in enumerate(("tree", "pipelined", "hybrid")):
            async with swarm.client(name, make_drafter=make_drafter, prefill_chunk=16) as client:
                answer = await client.generate(prompt(37), max_new_tokens=TOKENS, decoding=decoding)
                assert list(answer.token_ids) == expected, decoding
        await assert_clean(swarm)


@pytest.mark.parametrize("kind", KINDS)
@virtual_time
async def test_the_next_turn_reuses_the_prefix(kind: str) -> None:
    first = prompt(2 * HASH_BLOCK_TOKENS + 5)
    async with swarm_of(kind, 1) as swarm, swarm.client() as client:
        one = await client.generate(first, max_new_tokens=TOKENS)
        assert list(one.token_ids) == hf_greedy(model(kind), first, TOKENS)
        second = [*first, *one.token_ids, *prompt(9, 2)]
        two = await client.generate(second, max_new_tokens=10)
        assert two.cached_prompt_tokens == 2 * HASH_BLOCK_TOKENS
        assert list(two.token_ids) == hf_greedy(model(kind), second, 10)
        again = await client.generate(first[: 2 * HASH_BLOCK_TOKENS], max_new_tokens=8)  # goes back by one token
        assert list(again.token_ids) == hf_greedy(model(kind), first[: 2 * HASH_BLOCK_TOKENS], 8)
        await assert_clean(swarm)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [1, 9, 20])
@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (0, 2)], ids=str)
@virtual_time
async def test_a_lost_hop_is_replaced_by_replay(kind: str, at: int, victims: tuple[int, ...]) -> None:
    async with swarm_of(kind, 2) as swarm, swarm.client() as client:
        dead: list[str] = []
        kill = killer(swarm, *victims)
        strike = lambda chain: (dead.extend(chain.peers[v] for v in victims), kill(chain))[1]  # noqa: E731
        answer, _, _ = await answer_with(client, strike, at, prompt(37))
        assert list(answer.token_ids) == truth(kind, 37)
        assert 1 <= len(answer.repairs) <= len(victims)
        await assert_clean(swarm, *dead)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [1, 9, 20])
@pytest.mark.parametrize("victim", range(3))
@virtual_time
async def test_a_departing_node_transfers_its_states(kind: str, at: int, victim: int) -> None:
    async with swarm_of(kind, 2) as swarm, swarm.client() as client:
        answer, _, _ = await answer_with(client, leaver(swarm, victim), at, prompt(37))
        assert list(answer.token_ids) == truth(kind, 37)
        counters = [node.service.counters for node in swarm.nodes.values()]
        assert sum(c.replayed for c in counters) == 0
        assert sum(c.kv_transferred for c in counters) >= 37 + at - 1
        await asyncio.sleep(6.0)
        await assert_clean(swarm)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [8, 40])
@pytest.mark.parametrize("victim", range(3))
@virtual_time
async def test_a_crash_in_the_middle_of_a_prompt(kind: str, chunk: int, victim: int) -> None:
    async with swarm_of(kind, 2) as swarm, swarm.client(prefill_chunk=chunk) as client:
        stream = client.stream(prompt(170), max_new_tokens=TOKENS)
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0.12)
        chain = stream.chain
        assert chain is not None
        swarm.kill(chain.peers[victim])
        answer = await reading
        assert list(answer.token_ids) == truth(kind, 170)
        await assert_clean(swarm, chain.peers[victim])
