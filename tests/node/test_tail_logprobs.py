"""Log-probabilities from a real tail: of samples, of draft rows and of the prompt, against transformers' logits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from node_fakes import ToyClient, line_step, open_message, prompt_of, serving, toy_client
from tiny_models import ModelTensors, hf_logits, tiny_model
from virtual_clock import virtual_time

from swarm.messages import SessionFailed, SessionOpened, Step, StepResult, WireLogprobs
from swarm.testing.memory_network import LinkModel, MemoryNetwork
from swarm.types import LayerSpan, ModelId, Sampling
from swarm_hop.serving import tail_sampler
from swarm_hop.serving.span_engine import SpanEngine
from swarm_kernels.runtime.load import load_span

A, B = b"a" * 16, b"b" * 16
SOLO = [("solo", 0, 6)]


@cache
def model() -> Any:
    return tiny_model("llama")


def engine() -> tuple[SpanEngine, ModelId]:
    source = ModelTensors(model())
    span = load_span(source, LayerSpan(0, 6), torch.float32)
    return SpanEngine(span, span.new_cache(512)), ModelId(source.name, source.weight_hash, "fp32")


def expected(text: Sequence[int]) -> torch.Tensor:
    """ln p of every next token after each of `text`, `[n, vocab]`."""
    return hf_logits(model(), text).double().log_softmax(-1)


def check(wired: WireLogprobs, token: int, row: torch.Tensor, top: int) -> None:
    logprobs = wired.to_logprobs(token)
    assert logprobs.logprob == pytest.approx(float(row[token]), abs=1e-4)
    assert [t for t, _ in logprobs.top] == row.topk(top).indices.tolist()
    assert [v for _, v in logprobs.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)


async def result_of(client: ToyClient, step: Step) -> StepResult:
    await client.send("solo", step)
    result = await client.message()
    assert isinstance(result, StepResult), result
    return result


@virtual_time
async def test_samples_come_with_the_models_own_log_probabilities() -> None:
    """Not those after temperature, bias and penalties; of tree rows too, and whoever shares the batch."""
    network, (solo, served) = MemoryNetwork(link=LinkModel(0.001)), engine()
    prompt, drafts = prompt_of(9, 1), [5, 17, 40]
    sampling = Sampling(temperature=0.8, seed=2, repetition_penalty=1.5, logit_bias=((3, 5.0),), logprobs=4)
    async with serving(network, "solo", solo, served), toy_client(network) as client:
        await client.open(A, SOLO, 60, sampling, prompt, served)
        await client.open(B, SOLO, 60, Sampling(logprobs=0), (), served)
        await client.send("solo", line_step(B, 0, 0, prompt_of(20, 2)))
        step = Step(A, 0, 0, 0, 9, tokens=prompt + drafts, parents=[-1, 0, -1], slots=[0, 1, 2], forward_tokens=True)
        await client.send("solo", step)
        results = {m.session: m for m in (await client.message(), await client.message())}  # type: ignore[union-attr]
    result, other = results[A], results[B]
    assert isinstance(result, StepResult)
    assert isinstance(other, StepResult)
    paths = [prompt, [*prompt, 5], [*prompt, 5, 17], [*prompt, 40]]
    assert len(result.logprobs) == len(result.tokens) == 4
    for path, token, wired in zip(paths, result.tokens, result.logprobs, strict=True):
        check(wired, token, expected(path)[-1], 4)
    check(other.logprobs[0], other.tokens[0], expected(prompt_of(20, 2))[-1], 0)
    assert result.prompt_logprobs == other.prompt_logprobs == []


@pytest.mark.parametrize("rows_at_a_time", [3, 64])
@virtual_time
async def test_the_prompt_comes_chunk_by_chunk_and_whole(rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_sampler, "PROMPT_ROWS", rows_at_a_time)
    network, (solo, served) = MemoryNetwork(link=LinkModel(0.001)), engine()
    prompt, rng = prompt_of(30, 3), random.Random(4)
    rows = expected(prompt)
    async with serving(network, "solo", solo, served), toy_client(network) as client:
        await client.open(A, SOLO, 60, Sampling(prompt_logprobs=2), prompt, served)
        received: list[WireLogprobs] = []
        at = 0
        while at < len(prompt):
            part = prompt[at : at + rng.randrange(1, 12)]
            last = at + len(part) == len(prompt)
            result = await result_of(client, line_step(A, at, at, part, sample=last, forward=True))
            assert len(result.tokens) == last
            assert result.logprobs == []
            received += result.prompt_logprobs
            at += len(part)
        after = await result_of(client, line_step(A, at, at, [7], forward=True))
    assert after.prompt_logprobs == []
    assert len(received) == len(prompt) - 1  # nothing comes before the first token
    for position, wired in enumerate(received):
        check(wired, prompt[position + 1], rows[position], 2)


@virtual_time
async def test_a_silent_replay_gives_none_and_what_follows_goes_on() -> None:
    network, (solo, served) = MemoryNetwork(link=LinkModel(0.001)), engine()
    prompt = prompt_of(20, 5)
    async with serving(network, "solo", solo, served), toy_client(network) as client:
        message = open_message(A, SOLO, 0, 0, 6, 60, Sampling(prompt_logprobs=0), prompt, served)
        await client.send("solo", msgspec.structs.replace(message, replay_silent_until=8))
        assert isinstance(await client.message(), SessionOpened)
        await client.send("solo", line_step(A, 0, 0, prompt[:8], sample=False))
        assert await client.quiet(0.2)
        result = await result_of(client, line_step(A, 1, 8, prompt[8:], sample=True))
    assert len(result.prompt_logprobs) == len(prompt) - 8 - 1
    check(result.prompt_logprobs[0], prompt[9], expected(prompt)[8], 0)


@virtual_time
async def test_hidden_states_that_are_not_finite_in_the_prompt_end_one_session_only() -> None:
    network = MemoryNetwork(link=LinkModel(0.001))
    source = ModelTensors(model())
    span = load_span(source, LayerSpan(3, 6), torch.float32)
    served, hops = ModelId(source.name, source.weight_hash, "fp32"), [("solo", 3, 6)]
    async with (
        serving(network, "solo", SpanEngine(span, span.new_cache(512)), served),
        toy_client(network) as client,
    ):
        for session in (A, B):
            await client.open(session, hops, 60, Sampling(prompt_logprobs=0), [1, 2, 3], served)
        rows = {A: torch.zeros(2, 96), B: torch.full((2, 96), float("nan"))}
        for session, hidden in rows.items():
            await client.send("solo", Step(session, 0, 0, 0, 2, sample=False), hidden.numpy().tobytes())
        answers = {m.session: m for m in (await client.message(), await client.message())}  # type: ignore[union-attr]
    assert isinstance(answers[A], StepResult)
    assert len(answers[A].prompt_logprobs) == 2
    assert isinstance(answers[B], SessionFailed)
    assert answers[B].error == "model"
