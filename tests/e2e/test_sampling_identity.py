"""Penalties, bias, min-p and log-probabilities together with guessing: the tokens of transformers' own processors."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from memory_swarm import cut, memory_swarm
from reference_sampling import reference_answer
from scripted_drafters import Noise, Oracle
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import virtual_time

from swarm.testing.memory_network import LinkModel
from swarm_client.api.options import GenerationOptions
from swarm_client.speculation.drafters.inline import InlineDrafter

TOKENS = 20
STRATEGIES = ("sequential", "tree", "pipedec", "pipelined-tree", "auto")
BORDERS: dict[str, tuple[int, ...]] = {"one hop": (), "two": (4,), "three": (2, 4)}
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.9,
    "presence_penalty": 0.5,
    "logit_bias": {5: 3.0, 17: -100.0, 40: 1.5},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {**PENALTIES, "logprobs": 2},
    "seeded": {**PENALTIES, "temperature": 0.9, "min_p": 0.03, "top_k": 60, "top_p": 0.98, "seed": 23, "logprobs": 0},
    "with prompt log-probabilities": {"prompt_logprobs": 1, "min_p": 0.1, "temperature": 0.7, "seed": 5},
}


@cache
def model() -> Any:
    return tiny_model("llama")


def prompt() -> list[int]:
    rng = random.Random(8)
    return [rng.randrange(2, 131) for _ in range(18)]


@cache
def truth(options: str) -> list[int]:
    return reference_answer(model(), prompt(), TOKENS, GenerationOptions(**OPTIONS[options]).sampling())


async def answer(strategy: str, chain: str, options: str, victims: tuple[int, ...] = (), noise: bool = False) -> Any:
    """One answer, in whose middle the hops `victims` are killed."""
    expected = truth(options)
    drafter = Noise(expected) if noise else Oracle(expected, 0.85)
    spans = cut(6, *BORDERS[chain])
    async with (
        memory_swarm(ModelTensors(model()), spans * 2 if victims else spans, LinkModel(delay_s=0.01)) as swarm,
        swarm.client(prefill_chunk=7, make_drafter=lambda: InlineDrafter(drafter)) as client,
    ):
        stream = client.stream(prompt(), max_new_tokens=TOKENS, decoding=strategy, **OPTIONS[options])
        count, killed = 0, not victims
        async for piece in stream:
            count += len(piece.token_ids)
            if count >= 8 and not killed:
                killed = True
                assert stream.chain is not None
                for victim in victims:
                    swarm.kill(stream.chain.peers[victim])
        for engine in swarm.engines.values():
            engine.cache.check_integrity()
        return stream.result


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@virtual_time
async def test_tokens_are_those_of_transformers_processors(strategy: str, options: str) -> None:
    chain = list(BORDERS)[(STRATEGIES.index(strategy) + list(OPTIONS).index(options)) % 3]
    result = await answer(strategy, chain, options)
    assert list(result.token_ids) == truth(options)
    assert result.repairs == ()
    if strategy not in ("sequential", "auto"):
        assert result.speculation["hits"] > TOKENS // 3


@pytest.mark.parametrize("strategy", ["tree", "pipedec", "pipelined-tree"])
@virtual_time
async def test_useless_drafts_change_no_token(strategy: str) -> None:
    result = await answer(strategy, "three", "seeded", noise=True)
    assert list(result.token_ids) == truth("seeded")


@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (1, 2)], ids=str)
@pytest.mark.parametrize("strategy", ["sequential", "tree", "pipelined-tree"])
@virtual_time
async def test_a_crash_in_the_middle_changes_no_token(strategy: str, victims: tuple[int, ...]) -> None:
    """A new tail gets the text when it is opened, and its cache from replays without ids."""
    for options in ("seeded", list(OPTIONS)[victims[0]]):
        result = await answer(strategy, "three", options, victims)
        assert list(result.token_ids) == truth(options)
        assert result.repairs


@virtual_time
async def test_the_penalties_matter_here() -> None:
    assert truth("greedy") != hf_greedy(model(), prompt(), TOKENS)
    assert len(set(truth("greedy"))) > len(set(hf_greedy(model(), prompt(), TOKENS)))
