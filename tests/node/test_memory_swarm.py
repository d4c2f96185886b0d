"""Three nodes with a tiny random Llama answer raw messages with the very tokens transformers generates."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import Any

import pytest
import torch
from node_fakes import Generation, ToyClient, line_step, prompt_of, serving, toy_client
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import virtual_time

from swarm.messages import CloseSession, SessionFailed, Step, StepResult
from swarm.testing.memory_network import LinkModel, MemoryNetwork
from swarm.types import LayerSpan, Sampling
from swarm_hop.serving.span_engine import SpanEngine
from swarm_kernels.runtime.load import load_span

HOPS = [("n0", 0, 2), ("n1", 2, 4), ("n2", 4, 6)]
A, B = b"a" * 16, b"b" * 16


@cache
def model() -> Any:
    return tiny_model("llama")


@asynccontextmanager
async def swarm(
    *spans: tuple[str, int, int], dtype: torch.dtype = torch.float32
) -> AsyncIterator[tuple[ToyClient, list[SpanEngine]]]:
    source = ModelTensors(model())
    network = MemoryNetwork(link=LinkModel(delay_s=0.01))
    async with AsyncExitStack() as stack:
        engines = []
        for name, start, end in spans:
            span = load_span(source, LayerSpan(start, end), dtype)
            engines.append(SpanEngine(span, span.new_cache(512)))
            await stack.enter_async_context(serving(network, name, engines[-1]))
        yield await stack.enter_async_context(toy_client(network)), engines


@virtual_time
async def test_three_nodes_match_transformers() -> None:
    prompt = prompt_of(40, 1)
    async with swarm(*HOPS) as (client, engines):
        tokens = await Generation(client, A, prompt, HOPS).generate(16, chunks=(7, 20))
        assert tokens == hf_greedy(model(), prompt, 16)
        await asyncio.sleep(1)
        for engine in engines:
            assert len(engine.cache) == 0
            engine.cache.check_integrity()


@virtual_time
async def test_one_node_alone_is_a_chain_too() -> None:
    prompt = prompt_of(9, 2)
    hops = [("solo", 0, 6)]
    async with swarm(*hops) as (client, _):
        assert await Generation(client, A, prompt, hops).generate(12) == hf_greedy(model(), prompt, 12)


@virtual_time
async def test_chains_may_use_parts_of_overlapping_spans() -> None:
    prompt = prompt_of(20, 3)
    hops = [("x", 0, 3), ("y", 3, 5), ("z", 5, 6)]
    async with swarm(("x", 0, 4), ("y", 1, 6), ("z", 3, 6)) as (client, _):
        assert await Generation(client, A, prompt, hops).generate(10) == hf_greedy(model(), prompt, 10)


@virtual_time
async def test_many_sessions_at_once_do_not_touch_each_other() -> None:
    prompts = {bytes([i]) * 16: prompt_of(5 + 9 * i, 10 + i) for i in range(3)}
    async with swarm(*HOPS) as (client, _):
        runs = {s: Generation(client, s, p, HOPS) for s, p in prompts.items()}
        for run in runs.values():
            await run.open(8)
        for run in runs.values():
            await run.send()
        answered = 0
        while answered < 8 * len(runs):
            result = await client.message()
            assert isinstance(result, StepResult)
            answered += 1
            run = runs[result.session]
            run.known.extend(result.tokens)
            if len(run.known) < len(prompts[result.session]) + 8:
                await run.send()
        for session, prompt in prompts.items():
            assert runs[session].known[len(prompt) :] == hf_greedy(model(), prompt, 8)


@virtual_time
async def test_sampled_tokens_do_not_depend_on_the_chain() -> None:
    prompt = prompt_of(12, 4)
    sampling = Sampling(temperature=0.9, top_k=20, repetition_penalty=1.3, seed=7)
    answers = []
    for hops in ([("solo", 0, 6)], HOPS):
        async with swarm(*hops) as (client, _):
            answers.append(await Generation(client, A, prompt, hops).generate(14, chunks=(5,), sampling=sampling))
    assert answers[0] == answers[1]
    assert answers[0] != hf_greedy(model(), prompt, 14)


@virtual_time
async def test_hidden_states_that_are_not_finite_end_one_session_only() -> None:
    prompt = prompt_of(6, 5)
    async with swarm(*HOPS) as (client, _):
        good, bad = Generation(client, A, prompt, HOPS), Generation(client, B, prompt, HOPS)
        await good.open(4)
        await bad.open(4)
        hidden = model().config.hidden_size
        poison = torch.full((3, hidden), float("nan")).numpy().tobytes()
        await client.send("n2", Step(B, 0, 0, 0, 3), poison)
        await client.send("n2", Step(A, 0, 0, 0, 6), torch.zeros(6, hidden).numpy().tobytes())
        answers = {m.session: m for m in (await client.message(), await client.message())}  # type: ignore[union-attr]
        assert isinstance(answers[A], StepResult)
        assert isinstance(answers[B], SessionFailed)
        assert answers[B].error == "model"


def random_tree(rng: random.Random, nodes: int) -> list[int]:
    """Parents of `nodes` tree rows, in an order in which a parent comes before its children."""
    return [rng.randrange(-1, i) for i in range(nodes)]


def path(parents: Sequence[int], node: int) -> list[int]:
    above = [] if parents[node] < 0 else path(parents, parents[node])
    return [*above, node]


PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4, "logit_bias": ((5, 2.0),)}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.8, top_p=0.9, seed=5),
        Sampling(**PENALTIES),
        Sampling(temperature=0.8, min_p=0.02, seed=6, **PENALTIES),
    ],
    ids=["greedy", "seeded", "greedy with penalties", "seeded with penalties"],
)
@pytest.mark.parametrize("seed", range(3))
@virtual_time
async def test_a_tree_rows_token_is_that_of_decoding_its_path_one_by_one(seed: int, sampling: Sampling) -> None:
    rng = random.Random(seed)
    prompt, parents = prompt_of(9, seed), random_tree(rng, 7)
    drafted = [rng.randrange(131) for _ in parents]
    async with swarm(*HOPS) as (client, _):
        await client.open(A, HOPS, 60, sampling)
        slots = rng.sample(range(40), len(parents))
        wired = [slots[p] if p >= 0 else -1 for p in parents]
        forward = sampling.needs_history
        step = Step(A, 0, 0, 0, 9, tokens=prompt + drafted, parents=wired, slots=slots, forward_tokens=forward)
        await client.send("n0", step)
        result = await client.message()
        assert isinstance(result, StepResult)
        for node, token in enumerate(result.tokens, start=-1):
            rows = prompt + [drafted[n] for n in (path(parents, node) if node >= 0 else ())]
            session = bytes([node + 2]) * 16
            await client.open(session, HOPS, 60, sampling)
            await client.send("n0", line_step(session, 0, 0, rows, forward=forward))
            alone = await client.message()
            assert isinstance(alone, StepResult)
            assert alone.tokens == [token]
            for name, _, _ in HOPS:
                await client.send(name, CloseSession(session))


@virtual_time
async def test_commits_skips_and_rollbacks_leave_the_hops_as_sequential_decoding_does() -> None:
    prompt = prompt_of(6, 21)
    truth = hf_greedy(model(), prompt, 6)
    async with swarm(*HOPS) as (client, engines):
        await client.open(A, HOPS, 60)
        await client.send("n0", Step(A, 0, 0, 0, 6, tokens=[*prompt, truth[0], 7], parents=[-1, 0], slots=[0, 1]))
        assert (await client.message()).tokens[:2] == truth[:2]  # type: ignore[union-attr]
        # The first token drafted was right: commit its slot. The new leaf is right too, but nobody commits it yet.
        await client.send("n0", Step(A, 0, 1, 6, 0, tokens=[truth[1]], parents=[-1], slots=[5], commit_slots=[0]))
        assert (await client.message()).tokens == [truth[2]]  # type: ignore[union-attr]
        # A new epoch from the last point that all hops surely share: those ahead skip what they have committed.
        await client.send("n0", Step(A, 1, 2, 6, 0, tokens=[truth[2]], parents=[5], slots=[6], commit_slots=[0]))
        assert (await client.message()).tokens == [truth[3]]  # type: ignore[union-attr]
        assert [e.cache.length(key) for e in engines for key in e.cache._sessions] == [7, 7, 7]
        # And one that takes back even that: tokens 0 to 3 again, from there on line by line.
        await client.send("n0", Step(A, 2, 3, 4, 3, tokens=[*prompt[4:], truth[0]]))
        assert (await client.message()).tokens == [truth[1]]  # type: ignore[union-attr]
        await client.send("n0", Step(A, 2, 4, 7, 2, tokens=truth[1:3]))
        assert (await client.message()).tokens == [truth[3]]  # type: ignore[union-attr]
        for engine in engines:
            engine.cache.check_integrity()


@virtual_time
async def test_tree_slots_that_are_not_there_end_the_session() -> None:
    async with swarm(*HOPS) as (client, engines):
        await client.open(A, HOPS, 20)
        await client.send("n0", Step(A, 0, 0, 0, 1, tokens=[1], commit_slots=[3]))
        peer, answer, _ = await client.next()
        assert isinstance(answer, SessionFailed)
        assert (peer, answer.error) == ("n0", "invalid_request")
        assert len(engines[0].cache) == 0
