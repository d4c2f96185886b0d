"""Models whose rows are more than hidden states (per-layer embeddings, shared keys) in whole swarms: no cut, draft,
crash or departure changes a token, and every hop but the first sees rows alone."""

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
from zoo.families import FAMILIES
from zoo.shrink import tiny_config
from zoo.weights import random_model

from swarm.errors import NodeLeaving, UsageError
from swarm.types import Chain
from swarm_client.speculation.drafters.inline import InlineDrafter

pytestmark = pytest.mark.slow
KINDS = ("gemma3n, shared keys", "gemma4, shared keys")
SPANS = cut(4, 1, 3)


@cache
def model(kind: str) -> Any:
    name, changes = FAMILIES[kind]
    return random_model(tiny_config(name, **changes))


def prompt(length: int) -> list[int]:
    rng = random.Random(8)
    return [rng.randrange(3, 250) for _ in range(length)]


@cache
def truth(kind: str) -> list[int]:
    return hf_greedy(model(kind), prompt(37), TOKENS)


def swarm_of(kind: str, replicas: int) -> Any:
    return memory_swarm(ModelTensors(model(kind)), SPANS * replicas, LINK)


def leaver(swarm: MemorySwarm, victim: int) -> Callable[[Chain], None]:
    def strike(chain: Chain) -> None:
        assert swarm.nodes[chain.peers[victim]].service.evict(NodeLeaving("this node leaves"), lambda span: True)

    return strike


@pytest.mark.parametrize("kind", KINDS)
@virtual_time
async def test_drafts_change_no_token(kind: str) -> None:
    expected = truth(kind)

    def make_drafter() -> InlineDrafter:
        return InlineDrafter(Oracle(expected, 0.6))

    async with swarm_of(kind, 1) as swarm:
        for name, decoding in enumerate(("tree", "pipelined", "hybrid")):
            async with swarm.client(name, make_drafter=make_drafter, prefill_chunk=16) as client:
                answer = await client.generate(prompt(37), max_new_tokens=TOKENS, decoding=decoding)
                assert list(answer.token_ids) == expected, decoding
        await assert_clean(swarm)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (0, 2)], ids=str)
@virtual_time
async def test_a_lost_hop_is_replaced_by_replay(kind: str, victims: tuple[int, ...]) -> None:
    async with swarm_of(kind, 2) as swarm, swarm.client() as client:
        dead: list[str] = []
        kill = killer(swarm, *victims)
        strike = lambda chain: (dead.extend(chain.peers[v] for v in victims), kill(chain))[1]  # noqa: E731
        answer, _, _ = await answer_with(client, strike, 9, prompt(37))
        assert list(answer.token_ids) == truth(kind)
        assert 1 <= len(answer.repairs) <= len(victims)
        await assert_clean(swarm, *dead)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("victim", range(3))
@virtual_time
async def test_a_departing_node_transfers_keys_that_layers_share(kind: str, victim: int) -> None:
    async with swarm_of(kind, 2) as swarm, swarm.client() as client:
        answer, _, _ = await answer_with(client, leaver(swarm, victim), 9, prompt(37))
        assert list(answer.token_ids) == truth(kind)
        assert sum(node.service.counters.kv_transferred for node in swarm.nodes.values()) > 0
        await asyncio.sleep(6.0)
        await assert_clean(swarm)


@pytest.mark.parametrize("options", [{"local_layers": "1:1"}, {"trust": ("Q" * 46,)}], ids=["local layers", "trust"])
@virtual_time
async def test_what_would_hide_nothing_is_refused(options: dict[str, Any]) -> None:
    async with swarm_of(KINDS[0], 1) as swarm:
        with pytest.raises(UsageError, match="would hide nothing"):
            async with swarm.client(**options):
                raise AssertionError("it took part")
