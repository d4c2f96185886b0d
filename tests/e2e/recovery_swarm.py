"""What the recovery tests share: a swarm in memory, one answer with a fault in its middle, and the faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from memory_swarm import MemorySwarm, cut, memory_swarm
from tiny_models import ModelTensors, hf_greedy, tiny_model

from swarm.testing.memory_network import LinkModel
from swarm.types import Chain, PeerId
from swarm_client import GenerationResult, SwarmClient, TextStream

TOKENS = 24
SPANS = cut(6, 2, 4)
LINK = LinkModel(delay_s=0.005)


@cache
def model() -> Any:
    return tiny_model("llama")


def prompt(length: int = 18, seed: int = 8) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 131) for _ in range(length)]


@cache
def truth(length: int = 18) -> list[int]:
    return hf_greedy(model(), prompt(length), TOKENS)


def swarm_of(replicas: int, **options: Any) -> Any:
    return memory_swarm(ModelTensors(model()), SPANS * replicas, LINK, **options)


async def answer_with(
    client: SwarmClient,
    strike: Callable[[Chain], None],
    at: int,
    prompt_ids: Sequence[int] | None = None,
    **options: Any,
) -> tuple[GenerationResult, list[float], list[str]]:
    """One answer, with a `strike` at the chain once there are `at` tokens -> (it, times of tokens, waits)."""
    clock = asyncio.get_running_loop().time
    times: list[float] = []
    waits: list[str] = []
    struck = False
    stream: TextStream
    async with client.stream(prompt_ids or prompt(), max_new_tokens=TOKENS, **options) as stream:
        async for piece in stream:
            times += [clock()] * len(piece.token_ids)
            waits += [piece.waiting] if piece.waiting else []
            if not struck and len(times) >= at:
                assert stream.chain is not None
                strike(stream.chain)
                struck = True
        return stream.result, times, waits


def killer(swarm: MemorySwarm, *victims: int, silent: bool = False) -> Callable[[Chain], None]:
    def strike(chain: Chain) -> None:
        for victim in victims:
            swarm.kill(chain.peers[victim], silent)

    return strike


async def assert_clean(swarm: MemorySwarm, *dead: PeerId) -> None:
    await asyncio.sleep(1.0)
    assert [leak for peer, node in swarm.nodes.items() if peer not in dead and (leak := node.leaks())] == []
