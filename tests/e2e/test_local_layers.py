"""A client that computes the ends of the model itself: the tokens are transformers' own, whatever happens."""

from __future__ import annotations

import asyncio
import random
from functools import cache
from typing import Any

import pytest
import torch
from memory_swarm import MemorySwarm, cut, memory_swarm
from recovery_swarm import LINK, answer_with, assert_clean, killer
from scripted_drafters import Noise, Oracle
from test_audits import audited, make_liar, noisy, sign_all
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import virtual_time

from swarm.block_hash import HASH_BLOCK_TOKENS
from swarm.errors import NoRoute, UsageError
from swarm.testing.memory_network import LinkModel
from swarm.types import Chain, Hop, LayerSpan, PeerId
from swarm_client.home.local_layers import LocalLayers, foreign
from swarm_client.speculation.drafters.inline import InlineDrafter

LAYERS = 10
TOKENS = 24
BORDERS = {1: (), 2: (5,), 3: (4, 6), 4: (4, 5, 6), 5: (2, 4, 6, 8)}


@cache
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=LAYERS, tie_word_embeddings=True)


@cache
def prompt(length: int = 19, seed: int = 1) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(2, 131) for _ in range(length))


@cache
def truth(length: int = 19, seed: int = 1, tokens: int = TOKENS) -> list[int]:
    return hf_greedy(model(), list(prompt(length, seed)), tokens)


def swarm_of(hops: int, replicas: int = 1, link: LinkModel = LINK) -> Any:
    return memory_swarm(ModelTensors(model()), cut(LAYERS, *BORDERS[hops]) * replicas, link)


@pytest.mark.parametrize("last", range(5))
@pytest.mark.parametrize("first", range(5))
@virtual_time
async def test_tokens_are_those_of_transformers_whatever_stays_at_home(first: int, last: int) -> None:
    hops = 1 + (first + 2 * last) % 5
    async with swarm_of(hops) as swarm, swarm.client(prefill_chunk=8, local_layers=f"{first}:{last}") as client:
        answer = await client.generate(prompt(), max_new_tokens=TOKENS)
        assert list(answer.token_ids) == truth()
        assert answer.repairs == ()
        spans = [(hop.start, hop.end) for hop in answer.chain.hops]
        assert spans[0] == (0, first)
        assert spans[-1] == (LAYERS - last, LAYERS)
        assert [a[1] for a in spans[:-1]] == [b[0] for b in spans[1:]]
        assert {hop.peer for hop in foreign(answer.chain.hops)} <= set(swarm.peers)
        assert len(answer.hop_ms) == len(spans)
    await assert_clean(swarm)


STRATEGIES = ("sequential", "tree", "pipedec", "pipelined-tree", "auto")


@pytest.mark.parametrize("last", range(5))
@pytest.mark.parametrize("first", range(5))
@virtual_time
async def test_every_two_of_shares_hops_strategies_and_kills_meet(first: int, last: int) -> None:
    """An orthogonal array: of each two of these five, all 25 pairs of values come together once."""
    hops, strategy = 1 + (first + 2 * last) % 5, STRATEGIES[(2 * first + last) % 5]
    victim = (first + 4 * last) % 5 - 1  # -1: nobody dies

    def draft() -> InlineDrafter:
        return InlineDrafter(Oracle(truth(), 0.7))

    async with swarm_of(hops, replicas=2) as swarm:
        async with swarm.client(make_drafter=draft, local_layers=f"{first}:{last}") as client:
            struck: list[PeerId] = []

            def strike(chain: Any) -> None:
                if victim >= 0:
                    others = foreign(chain.hops)
                    struck.append(others[victim % len(others)].peer)
                    swarm.kill(struck[0], silent=bool(first % 2))

            answer, _, _ = await answer_with(client, strike, 7, prompt(), decoding=strategy)
        assert list(answer.token_ids) == truth()
        assert len(answer.repairs) == len(struck) == (victim >= 0)


@pytest.mark.parametrize("drafter", [Oracle, Noise])
@pytest.mark.parametrize("local", ["0:0", "1:1", "3:2"])
@pytest.mark.parametrize("strategy", ["tree", "pipedec", "auto"])
@virtual_time
async def test_every_strategy_gives_the_same_tokens(strategy: str, local: str, drafter: type[Oracle]) -> None:
    def draft() -> InlineDrafter:
        return InlineDrafter(drafter(truth(), 0.8))

    async with swarm_of(3) as swarm, swarm.client(make_drafter=draft, local_layers=local) as client:
        answer = await client.generate(prompt(), max_new_tokens=TOKENS, decoding=strategy)
    assert list(answer.token_ids) == truth()
    assert answer.repairs == ()
    if drafter is Oracle:
        assert answer.speculation is not None
        assert strategy == "auto" or answer.speculation["hits"] > 0


OPTIONS: dict[str, dict[str, Any]] = {
    "seeded": {"temperature": 0.9, "top_p": 0.95, "top_k": 40},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2, "logit_bias": {7: 2.0}},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("local", ["0:0", "1:2"])
@virtual_time
async def test_sampling_at_home_is_sampling_at_the_tail(local: str, options: str) -> None:
    given = {**OPTIONS[options], "seed": 17, "max_new_tokens": TOKENS}

    async with swarm_of(3) as swarm:
        async with swarm.client() as client:
            usual = await client.generate(prompt(), **given)
        async with swarm.client(
            1, make_drafter=lambda: InlineDrafter(Oracle(usual.token_ids)), local_layers=local
        ) as own:
            for decoding in ("sequential", "tree"):
                answer = await own.generate(prompt(), decoding=decoding, **given)
                assert answer.token_ids == usual.token_ids
                assert [t.token for t in answer.logprobs] == [t.token for t in usual.logprobs]
                assert len(answer.prompt_logprobs) == len(usual.prompt_logprobs)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("victim", [1, 2, 3])
@pytest.mark.parametrize("local", ["0:0", "1:1", "4:3"])
@virtual_time
async def test_a_foreign_hop_that_dies_costs_time_and_no_token(local: str, victim: int, silent: bool) -> None:
    async with swarm_of(3, replicas=2) as swarm, swarm.client(local_layers=local) as client:
        answer, _, _ = await answer_with(client, _strike(swarm, victim, silent), 9, prompt())
        assert list(answer.token_ids) == truth()
        assert len(answer.repairs) == 1
    dead = [peer for peer in swarm.peers if swarm.network.alive(peer) is None or peer in swarm.network._dark]
    await assert_clean(swarm, *dead)


def _strike(swarm: MemorySwarm, victim: int, silent: bool) -> Any:
    def strike(chain: Any) -> None:
        others = foreign(chain.hops)
        swarm.kill(others[min(victim, len(others)) - 1].peer, silent)

    return strike


@virtual_time
async def test_all_foreign_hops_may_die_at_once() -> None:
    async with swarm_of(3, replicas=2) as swarm, swarm.client(local_layers="1:1") as client:
        answer, _, _ = await answer_with(client, killer(swarm, 1, 2, 3), 9, prompt())
    assert list(answer.token_ids) == truth()


@virtual_time
async def test_the_next_turn_finds_its_prefix_at_home_and_elsewhere() -> None:
    first = list(prompt(2 * HASH_BLOCK_TOKENS + 5))
    async with swarm_of(2) as swarm, swarm.client(local_layers="2:1", prefill_chunk=16) as client:
        one = await client.generate(first, max_new_tokens=30)
        second = [*first, *one.token_ids, 5, 6, 7]
        two = await client.generate(second, max_new_tokens=10)
        assert two.cached_prompt_tokens == (len(first) + 29) // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS
        assert list(two.token_ids) == hf_greedy(model(), second, 10)
        forks = client.fork_streams(second, 3, temperature=0.8, seed=4, max_new_tokens=8)
        answers = await asyncio.gather(*(fork.read() for fork in forks))
        alone = [await client.generate(second, temperature=0.8, seed=4 + i, max_new_tokens=8) for i in range(3)]
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]


@virtual_time
async def test_clients_with_and_without_the_ends_share_batches() -> None:
    """A node with the whole model takes ids from one and hidden states from another, and samples for one of them."""
    prompts = [(length, seed) for seed, length in enumerate((3, 17, 40, 9))]
    async with (
        memory_swarm(ModelTensors(model()), [LayerSpan(0, LAYERS)], LINK) as swarm,
        swarm.client(0) as usual,
        swarm.client(1, local_layers="0:0") as own,
        swarm.client(2, local_layers="0:1") as other,
    ):
        clients = (usual, own, other)
        asked = [(client, length, seed) for client in clients for length, seed in prompts]
        answers = await asyncio.gather(
            *(client.generate(prompt(length, seed), max_new_tokens=16) for client, length, seed in asked)
        )
        for engine in swarm.engines.values():
            engine.cache.check_integrity()
    for (_, length, seed), answer in zip(asked, answers, strict=True):
        assert list(answer.token_ids) == truth(length, seed, 16)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("local", ["0:0", "1:1"])
@virtual_time
async def test_a_hop_that_lies_is_found_and_the_ends_at_home_never_are(local: str, at: int) -> None:
    async with (
        swarm_of(3, replicas=3) as swarm,
        swarm.client(audits="wait", decoding="sequential", local_layers=local) as client,
    ):
        sign_all(swarm)
        _, honest = await audited(client)
        assert not honest.liars
        assert not honest.disputed
        assert len(honest.checked) == 3
        answer = await client.generate(prompt(), max_new_tokens=4)
        liar: PeerId = foreign(answer.chain.hops)[at].peer
        make_liar(swarm, liar, noisy)
        _, found = await audited(client)
        assert found.liars == (liar,)


class _Nonsense:
    """A span that returns no numbers."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def __getattr__(self, name: str) -> Any:
        return getattr(self._span, name)

    def forward(self, *args: Any) -> torch.Tensor:
        return self._span.forward(*args) * float("nan")


@virtual_time
async def test_a_last_hop_that_returns_no_numbers_is_left() -> None:
    async with swarm_of(2, replicas=2) as swarm, swarm.client(local_layers="1:1", decoding="sequential") as client:
        answer = await client.generate(prompt(), max_new_tokens=4)
        bad = foreign(answer.chain.hops)[-1].peer
        swarm.engines[bad]._span = _Nonsense(swarm.engines[bad]._span)  # type: ignore[assignment]
        answer = await client.generate(prompt(), max_new_tokens=TOKENS)
        assert list(answer.token_ids) == truth()
        assert any("no numbers" in repair for repair in answer.repairs)
        assert bad not in answer.chain.peers


@virtual_time
async def test_missing_layers_are_named_in_the_model_s_own_numbers() -> None:
    async with (
        memory_swarm(ModelTensors(model()), [LayerSpan(0, 4), LayerSpan(6, LAYERS)]) as swarm,
        swarm.client(local_layers="2:2") as client,
    ):
        with pytest.raises(NoRoute, match=f"layers 4:6 of {LAYERS}") as caught:
            await client.generate([5, 6], max_new_tokens=4)
        assert caught.value.missing == ((4, 6),)
        assert (await client.snapshot()).num_layers == LAYERS


@virtual_time
async def test_only_the_tensors_of_the_ends_are_read_and_a_tied_embedding_once() -> None:
    source = ModelTensors(model())
    async with memory_swarm(ModelTensors(model()), [LayerSpan(0, LAYERS)]) as swarm:
        swarm.source = source
        async with swarm.client(local_layers="1:2") as client:
            assert list((await client.generate(prompt(), max_new_tokens=4)).token_ids) == truth()[:4]
    layers = {name.split(".")[2] for name in source.read if ".layers." in name}
    assert layers == {"0", "8", "9"}
    assert source.read.count("model.embed_tokens.weight") == 1


@virtual_time
async def test_auto_takes_some_and_says_so() -> None:
    async with swarm_of(2) as swarm, swarm.client(local_layers="auto") as client:
        answer = await client.generate(prompt(), max_new_tokens=8)
        assert list(answer.token_ids) == truth()[:8]
        assert client.home is not None
        layers = client.home.layers
        assert (answer.chain.hops[0], answer.chain.hops[-1]) == layers.hops
        assert f"layers {layers.hops[0].span}" in answer.explanation
        assert "token ids stay here" in answer.exposure


@virtual_time
async def test_without_local_layers_the_ends_are_said_to_see_ids() -> None:
    async with swarm_of(3) as swarm, swarm.client() as client:
        answer = await client.generate(prompt(), max_new_tokens=8)
    first, middle, last = (peer[-6:] for peer in answer.chain.peers)
    assert f"{first} and {last} see token ids" in answer.exposure
    assert f"{middle} sees hidden states" in answer.exposure


@pytest.mark.parametrize("text", ["5:5", "1", "a:b", "-1:0", "1:1:1", "99999:0"])
@virtual_time
async def test_a_share_that_leaves_nothing_or_means_nothing_is_refused(text: str) -> None:
    async with swarm_of(1) as swarm:
        with pytest.raises(UsageError):
            async with swarm.client(local_layers=text):
                """Never."""


def test_chains_go_home_and_back() -> None:
    layers = LocalLayers(2, 3, LAYERS)
    chain = layers.around(_chain((0, 2), (2, 5)))
    assert [(hop.start, hop.end) for hop in chain.hops] == [(0, 2), (2, 4), (4, 7), (7, 10)]
    assert layers.inside(chain) == _chain((0, 2), (2, 5))


def _chain(*spans: tuple[int, int]) -> Any:
    return Chain(tuple(Hop(f"n{i}", *span) for i, span in enumerate(spans)))
