"""Token ids on their way to the tail, and clients that send wrong ones: only their own session ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
from node_fakes import ROWS, ToyClient, ToyEngine, line_step, open_message, toy_client, toy_node
from virtual_clock import virtual_time

from swarm.messages import SessionFailed, SessionOpened, Step, StepResult, WireSampling
from swarm.testing.memory_network import LinkModel, MemoryNetwork
from swarm.types import LayerSpan, Sampling
from swarm_hop.serving.session_server import SessionServer

A, B = b"a" * 16, b"b" * 16
HOPS = [("n0", 0, 3), ("n1", 3, 6)]
PENALTY = Sampling(repetition_penalty=1.2)


@asynccontextmanager
async def two_hops(network: MemoryNetwork) -> AsyncIterator[tuple[ToyClient, list[SessionServer], list[ToyEngine]]]:
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(toy_node(network, n, LayerSpan(a, b))) for n, a, b in HOPS]
        client = await stack.enter_async_context(toy_client(network))
        yield client, [service for service, _ in nodes], [engine for _, engine in nodes]


def network() -> MemoryNetwork:
    return MemoryNetwork(link=LinkModel(delay_s=0.005))


@pytest.mark.parametrize("forward", [True, False])
@virtual_time
async def test_ids_travel_over_a_relayed_edge_only_if_asked_for(forward: bool) -> None:
    net = network()
    async with two_hops(net) as (client, _, _):
        net.partition("n0", "n1")
        await client.open(A, HOPS, sampling=PENALTY if forward else None, history=[5, 6])
        sent = Step(A, 0, 0, 0, 2, tokens=[5, 6, 7], parents=[-1], slots=[3], forward_tokens=forward)
        await client.send("n0", sent)
        peer, step, body = await client.next()
        assert (peer, isinstance(step, Step)) == ("n0", True)
        assert isinstance(step, Step)
        assert (step.tokens, step.forward_tokens) == (([5, 6, 7], True) if forward else ([], False))
        await client.send("n1", step, body)
        assert isinstance(result := await client.message(), StepResult)
        assert result.tokens == [12, 13]


BAD_OPENS: dict[str, tuple[dict[str, Any], str]] = {
    "a history longer than the session": ({"history": [1] * 51, "prompt_tokens": 1}, "protocol"),
    "a prompt longer than the history": ({"history": [1, 2], "prompt_tokens": 3}, "protocol"),
    "an id beyond the vocabulary": ({"history": [1, ROWS.vocab_size]}, "protocol"),
    "a bias beyond the vocabulary": (
        {"sampling": WireSampling.of(Sampling(logit_bias=((ROWS.vocab_size, 1.0),)))},
        "invalid_request",
    ),
    "a bias twice": ({"sampling": WireSampling(logit_bias=[(1, 1.0), (1, 2.0)])}, "invalid_request"),
}


@pytest.mark.parametrize("name", BAD_OPENS)
@virtual_time
async def test_an_impossible_history_or_bias_is_refused_and_takes_no_place(name: str) -> None:
    changes, error = BAD_OPENS[name]
    hops = [("n1", 3, 6)]
    async with two_hops(network()) as (client, services, engines):
        message = open_message(A, hops, 0, 3, 6, sampling=PENALTY)
        await client.send("n1", msgspec.structs.replace(message, **changes))
        assert isinstance(failed := await client.message(), SessionFailed)
        assert failed.error == error
        assert services[1].sessions == 0
        assert engines[1].reserved == {}
        for session in (A, B, b"c" * 16):  # as many as one peer may have
            await client.open(session, hops, sampling=PENALTY, history=[1])
        assert services[1].sessions == 3


TREE = {"tokens": [1, 2, 3], "parents": [-1, 0], "slots": [0, 1]}
BAD_STEPS: dict[str, Step] = {
    "an id beyond the vocabulary": Step(A, 0, 1, 2, 1, tokens=[ROWS.vocab_size], forward_tokens=True),
    "fewer ids than rows": Step(A, 0, 1, 2, 2, tokens=[1], forward_tokens=True),
    "more ids than rows": Step(A, 0, 1, 2, 1, tokens=[1, 2], forward_tokens=True),
    "a sample without ids": Step(A, 0, 1, 2, 1),
    "a tree without ids": Step(A, 0, 1, 2, 1, sample=False, parents=[-1], slots=[0]),
    "a replay beyond the known text": Step(A, 0, 1, 2, 9, sample=False),
    "an unknown parent": Step(A, 0, 1, 2, 1, tokens=[1, 2], parents=[77], slots=[0], forward_tokens=True),
    "an unknown slot": Step(A, 0, 1, 2, 1, tokens=[1], commit_slots=[9], forward_tokens=True),
    "a slot in use": Step(A, 0, 1, 2, 0, tokens=[1], parents=[-1], slots=[5], forward_tokens=True),
}


@pytest.mark.parametrize("name", BAD_STEPS)
@virtual_time
async def test_bad_ids_end_their_session_and_no_other(name: str) -> None:
    """Sent to the tail past the first hop, as a hop that checks nothing would."""
    step = BAD_STEPS[name]
    async with two_hops(network()) as (client, services, _):
        hops = [("n1", 3, 6)]
        for session in (A, B):
            await client.open(session, hops, sampling=PENALTY, history=[1, 2, 3, 4])
            begin = Step(session, 0, 0, 0, 2, tokens=[1, 2, 9], parents=[-1], slots=[5], forward_tokens=True)
            await client.send("n1", begin, bytes(3))
            assert isinstance(await client.message(), StepResult)
        await client.send("n1", step, bytes(step.rows))
        assert isinstance(failed := await client.message(), SessionFailed)
        assert (failed.session, failed.error) == (A, "protocol")
        following = Step(B, 0, 1, 2, 1, tokens=[3, 4], parents=[-1], slots=[0], forward_tokens=True)
        await client.send("n1", following, bytes(2))
        while isinstance(answer := await client.message(), SessionFailed):
            assert answer.session == A  # the violation itself is answered too
        assert isinstance(answer, StepResult)
        assert answer.session == B
        assert services[1].sessions == 1


@virtual_time
async def test_a_session_that_needs_no_history_is_served_without_ids_as_before() -> None:
    async with two_hops(network()) as (client, _, _):
        await client.open(A, HOPS, sampling=Sampling(temperature=0.5, logprobs=3))
        await client.send("n0", line_step(A, 0, 0, [1, 2]))
        assert isinstance(result := await client.message(), StepResult)
        assert result.tokens == [8]


@virtual_time
async def test_a_replaced_tail_takes_silent_replays_without_ids() -> None:
    async with two_hops(network()) as (client, _, _):
        message = open_message(A, [("n1", 3, 6)], 0, 3, 6, sampling=PENALTY, history=[1, 2, 3, 4])
        await client.send("n1", msgspec.structs.replace(message, replay_silent_until=3, epoch=1))
        assert isinstance(await client.message(), SessionOpened)
        await client.send("n1", Step(A, 1, 0, 0, 3, sample=False), bytes(3))
        assert await client.quiet(0.2)
        await client.send("n1", Step(A, 1, 1, 3, 1, tokens=[4], forward_tokens=True), bytes([4]))
        assert isinstance(result := await client.message(), StepResult)
        assert result.tokens == [7]
