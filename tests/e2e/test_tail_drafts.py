"""A drafter at the tail: whatever it says and whatever is lost on the way, the tokens are the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from eagle_reference import random_tensors, save_speculators
from memory_swarm import MemorySwarm, cut, memory_swarm
from scripted_tails import Say, opened, scripted
from test_eagle import LAYERS, LINK, PROMPT, SEEDED, TOKENS, accurate_head, model
from test_tapped_drafters import DFlash, Mtp
from tiny_models import ModelTensors, hf_greedy
from virtual_clock import virtual_time

from swarm_hop.serving.session import HopSession
from swarm_kernels.draft.eagle import open_eagle
from swarm_kernels.draft.session import DraftCandidates
from swarm_kernels.draft.tail import OpenDrafter

STRATEGIES = ["tree", "pipedec", "pipelined-tree", "auto"]


def eagle_at_tail(made: Any, source: Any, answer: Sequence[int], folder: Path) -> OpenDrafter:
    return opened(open_eagle(accurate_head(made, answer, folder), source))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("borders", [(), (3,), (2, 6), (2, 4, 6)], ids=["one hop", "two", "three", "four"])
def test_greedy_tokens_are_the_same_and_an_accurate_head_is_believed(
    strategy: str, borders: tuple[int, ...], tmp_path: Path
) -> None:
    """The taps are at 5, 6 and 7: all at the tail, or carried over one link or two."""
    made = model()
    source, truth = ModelTensors(made), hf_greedy(made, PROMPT, TOKENS)
    drafter = eagle_at_tail(made, source, truth, tmp_path)

    @virtual_time
    async def scenario() -> None:
        async with (
            memory_swarm(source, cut(LAYERS, *borders), LINK, drafter=drafter) as swarm,
            swarm.client(prefill_chunk=8, drafter="tail") as client,
        ):
            answer = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding=strategy)
            assert list(answer.token_ids) == truth
            assert answer.repairs == ()
            assert answer.speculation is not None
            assert answer.speculation["tail"]["drafts"] > 3
            if strategy == "tree":
                assert answer.speculation["hits"] > TOKENS // 3
                assert answer.speculation["tail"]["tokens"] > TOKENS // 4
            other = await client.generate(PROMPT[:9], max_new_tokens=TOKENS, decoding=strategy)
            assert list(other.token_ids) == hf_greedy(made, PROMPT[:9], TOKENS)
            await asyncio.sleep(0.1)  # until they know that it has ended
            for node in swarm.nodes.values():
                assert node.leaks() == ""

    scenario()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", [DFlash, Mtp])
def test_blocks_and_mtp_layers_at_the_tail(case: Any, strategy: str, tmp_path: Path) -> None:
    target = case(tmp_path)
    drafter = opened(target.head("accurate"))

    @virtual_time
    async def scenario() -> None:
        async with (
            memory_swarm(target.source, cut(target.layers, 1, 3), LINK, drafter=drafter) as swarm,
            swarm.client(drafter="tail") as client,
        ):
            answer = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding=strategy)
            assert list(answer.token_ids) == target.truth
            assert answer.speculation is not None
            if strategy == "tree":
                assert answer.speculation["hits"] > TOKENS // 3

    scenario()


@pytest.mark.parametrize("kind", ["accurate", "random", "adversarial", "nan"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("sampling", [SEEDED, {**SEEDED, "repetition_penalty": 1.2}], ids=["seeded", "penalized"])
def test_seeded_tokens_are_the_same_whatever_the_head_says(
    sampling: dict[str, Any], strategy: str, kind: str, tmp_path: Path
) -> None:
    target = DFlash(tmp_path)
    drafter = opened(target.head(kind))

    @virtual_time
    async def scenario() -> None:
        async with memory_swarm(target.source, cut(target.layers, 3, 6), LINK, drafter=drafter) as swarm:
            async with swarm.client(drafter="ngram") as client:
                plain = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding="sequential", **sampling)
            async with swarm.client(1, drafter="tail") as client:
                drafted = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding=strategy, **sampling)
        assert drafted.token_ids == plain.token_ids
        assert drafted.repairs == ()
        assert drafted.speculation is not None
        assert ("tail" in drafted.speculation) == (kind != "nan")

    scenario()


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("strategy", ["tree", "pipelined-tree"])
def test_a_killed_hop_costs_no_token_and_the_next_tail_drafts_on(strategy: str, victim: int, tmp_path: Path) -> None:
    made = model()
    source, truth = ModelTensors(made), hf_greedy(made, PROMPT, 40)
    drafter = eagle_at_tail(made, source, truth, tmp_path)

    @virtual_time
    async def scenario() -> None:
        async with (
            memory_swarm(source, cut(LAYERS, 3, 6) * 2, LINK, drafter=drafter) as swarm,
            swarm.client(prefill_chunk=8, drafter="tail") as client,
        ):
            stream = client.stream(PROMPT, max_new_tokens=40, decoding=strategy)
            seen: list[int] = []
            killed = -1
            async for piece in stream:
                seen += piece.token_ids
                if len(seen) >= 9 and killed < 0:
                    assert stream.chain is not None
                    assert stream.speculation is not None
                    killed = stream.speculation["tail"]["drafts"]
                    swarm.kill(stream.chain.peers[victim])
            assert seen == truth
            assert len(stream.result.repairs) == 1
            assert stream.result.speculation is not None
            assert stream.result.speculation["tail"]["drafts"] > killed + 2
            if strategy == "tree":
                assert stream.result.speculation["tail"]["tokens"] > 12

    scenario()


@pytest.mark.parametrize("lost", ["all", "some"])
def test_lost_taps_cost_no_token(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    source, truth = ModelTensors(made), hf_greedy(made, PROMPT, 40)
    drafter = eagle_at_tail(made, source, truth, tmp_path)
    carry = HopSession.carry

    def keep(self: HopSession, sender: str, message: Any, body: Any) -> None:
        if lost == "some" and message.step % 3:
            carry(self, sender, message, body)

    monkeypatch.setattr(HopSession, "carry", keep)

    @virtual_time
    async def scenario() -> None:
        async with (
            memory_swarm(source, cut(LAYERS, 3, 6), LINK, drafter=drafter) as swarm,
            swarm.client(drafter="tail") as client,
        ):
            answer = await client.generate(PROMPT, max_new_tokens=40, decoding="tree")
            assert list(answer.token_ids) == truth
            assert answer.repairs == ()
            assert answer.speculation is not None
            assert ("tail" in answer.speculation) == (lost == "some")

    scenario()


def test_a_reused_prefix_and_forks_draft_with_the_rows_that_come(tmp_path: Path) -> None:
    made = model()
    source = ModelTensors(made)
    prompt = [5 + 11 * i % 120 for i in range(200)]
    truth = hf_greedy(made, prompt, TOKENS)
    drafter = opened(open_eagle(save_speculators(tmp_path, random_tensors(2)), source))

    @virtual_time
    async def scenario() -> None:
        async with (
            memory_swarm(source, cut(LAYERS, 3, 6), LINK, drafter=drafter) as swarm,
            swarm.client(drafter="tail") as client,
        ):
            for cached in (0, 192):  # the second time, all but a few rows come from the hops' prefix caches
                answer = await client.generate(prompt, max_new_tokens=TOKENS, decoding="tree")
                assert list(answer.token_ids) == truth
                assert answer.cached_prompt_tokens == cached
                assert answer.speculation is not None
                assert answer.speculation["tail"]["drafts"] > TOKENS // 4
            plain, forks = [], client.fork_streams(prompt, 3, max_new_tokens=TOKENS, **SEEDED)
            for fork in forks:
                plain.append([token async for piece in fork for token in piece.token_ids])
            for i, tokens in enumerate(plain):
                options = {**SEEDED, "seed": SEEDED["seed"] + i, "decoding": "sequential"}
                alone = await client.generate(prompt, max_new_tokens=TOKENS, **options)
                assert list(alone.token_ids) == tokens

    scenario()


def _noise(path: tuple[int, ...], width: int) -> DraftCandidates:
    rng = random.Random(str(path))
    return [(rng.randrange(131), -rng.random()) for _ in range(width)][:1]


SAYINGS: dict[str, Say] = {
    "noise": _noise,
    "foreign ids": lambda path, width: [(131 + len(path), -0.1)],
    "negative ids": lambda path, width: [(-5, -0.1)],
    "twice the same": lambda path, width: [(7, -0.1)] * width,
    "not finite": lambda path, width: [(3, float("nan")), (4, float("inf"))],
    "huge": lambda path, width: [(token, -0.001) for token in range(130)],
    "nothing": lambda path, width: [],
}


@pytest.mark.parametrize("saying", SAYINGS)
@pytest.mark.parametrize("strategy", ["tree", "pipelined-tree"])
def test_a_tail_whose_drafter_talks_nonsense_costs_drafts_or_itself(strategy: str, saying: str, tmp_path: Path) -> None:
    made = model()
    source, truth = ModelTensors(made), hf_greedy(made, PROMPT, TOKENS)
    drafter = scripted((2, 5), 96, SAYINGS[saying])

    @virtual_time
    async def scenario() -> None:
        async with (
            memory_swarm(source, cut(LAYERS, 3, 6) * 2, LINK, drafter=drafter) as swarm,
            swarm.client(drafter="tail") as client,
        ):
            for peer in swarm.peers[3:]:  # only the first tail drafts
                swarm.engines[peer].tail_drafts = None
            answer = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding=strategy)
            assert list(answer.token_ids) == truth

    scenario()


def test_drafts_that_do_not_pay_are_ended_by_the_client(tmp_path: Path) -> None:
    made = model()
    source, truth = ModelTensors(made), hf_greedy(made, PROMPT, 60)
    head = open_eagle(save_speculators(tmp_path, random_tensors(2)), source)

    @virtual_time
    async def scenario() -> None:
        async with (
            memory_swarm(source, cut(LAYERS, 3, 6), LINK, drafter=opened(head)) as swarm,
            swarm.client(drafter="tail") as client,
        ):
            carried = _carried(swarm)
            answer = await client.generate(PROMPT, max_new_tokens=60, decoding="tree")
            assert list(answer.token_ids) == truth
            assert answer.repairs == ()
            assert answer.speculation is not None
            tail = answer.speculation["tail"]
            assert 16 < tail["drafts"] < 24
            assert "brings" in tail["ended"]
            assert carried() == 0  # no session carries taps any more, nor drafts

    scenario()


def _carried(swarm: MemorySwarm) -> Callable[[], int]:
    return lambda: sum(s.drafted is not None for node in swarm.nodes.values() for s in node.service.live())
