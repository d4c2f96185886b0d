"""Reroute: what a hop replays, whose Reroute it accepts, and what it does with late steps."""

from __future__ import annotations

import msgspec
import pytest
from node_fakes import ToyClient, line_step, open_message, toy_client, toy_node
from virtual_clock import virtual_time

from swarm.messages import Reroute, SessionFailed, SessionOpened, Step, StepResult
from swarm.testing.memory_network import LinkModel, MemoryNetwork
from swarm.types import LayerSpan

A = b"a" * 16
OLD = [("n0", 0, 2), ("n1", 2, 4), ("n2", 4, 6)]
NEW = [("n0", 0, 2), ("spare", 2, 4), ("n2", 4, 6)]


async def begin(client: ToyClient, tokens: list[int]) -> None:
    await client.open(A, OLD)
    await client.send("n0", line_step(A, 0, 0, tokens))
    assert isinstance(await client.message(), StepResult)


async def replace_middle(client: ToyClient, settled: int, epoch: int = 1) -> None:
    """What a client does when n1 is lost."""
    message = open_message(A, NEW, 1, 2, 4)
    await client.send("spare", msgspec.structs.replace(message, epoch=epoch, replay_silent_until=settled))
    assert await opened(client) == ("spare", epoch)
    await client.send("n0", Reroute(A, epoch, "", "spare", replay=settled))
    await client.send("n2", Reroute(A, epoch, "spare", ""))
    assert {await opened(client), await opened(client)} == {("n0", epoch), ("n2", epoch)}


async def opened(client: ToyClient) -> tuple[str, int]:
    while True:
        peer, message, _ = await client.next()
        if isinstance(message, SessionOpened):
            return peer, message.epoch
        assert isinstance(message, SessionFailed)
        assert message.unreachable_next_hop == "n1"


@virtual_time
async def test_a_replacement_is_replayed_to_and_stays_silent_meanwhile() -> None:
    network = MemoryNetwork(link=LinkModel(delay_s=0.005))
    async with (
        toy_node(network, "n0", LayerSpan(0, 2)) as (first, _),
        toy_node(network, "n1", LayerSpan(2, 4)),
        toy_node(network, "n2", LayerSpan(4, 6)) as (tail, _),
        toy_node(network, "spare", LayerSpan(2, 4)) as (spare, _),
        toy_client(network) as client,
    ):
        await begin(client, [1, 2, 3])
        network.kill("n1")
        await replace_middle(client, settled=3)
        await client.send("n0", Step(A, 1, 1, 3, 1, tokens=[9]))
        answer = await client.message()
        assert isinstance(answer, StepResult)
        assert (answer.tokens, answer.epoch, len(answer.trace)) == ([15], 1, 3)
        assert first.counters.replayed == 3
        assert [s.counters.steps for s in (first, spare, tail)] == [2, 2, 2]  # the replay is one of the spare's


@virtual_time
async def test_a_live_hop_that_was_replaced_is_ignored_without_a_violation() -> None:
    network = MemoryNetwork(link=LinkModel(delay_s=0.005))
    async with (
        toy_node(network, "n0", LayerSpan(0, 2)),
        toy_node(network, "n1", LayerSpan(2, 4)),
        toy_node(network, "n2", LayerSpan(4, 6)) as (tail, _),
        toy_node(network, "spare", LayerSpan(2, 4)),
        toy_client(network) as client,
    ):
        await begin(client, [1, 2])
        await replace_middle(client, settled=2)
        for number in range(8):  # late news by way of the old hop, to which the client may still speak
            await client.send("n1", Step(A, 0, number, 2 + number, 1), b"x")
        await client.send("n0", Step(A, 1, 9, 2, 1, tokens=[9]))
        answer = await client.message()
        assert isinstance(answer, StepResult)
        assert answer.tokens == [15]
        assert tail.counters.protocol_errors == 0


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Reroute(A, 1, "", "spare", replay=4), "protocol"),  # it holds three
        (Reroute(A, 1, "", ""), "protocol"),  # it is not the tail
        (Reroute(b"b" * 16, 1, "", "spare"), "unknown_session"),
    ],
)
def test_what_cannot_be_done_is_refused(message: Reroute, error: str) -> None:
    @virtual_time
    async def scenario() -> None:
        network = MemoryNetwork(link=LinkModel(delay_s=0.005))
        async with (
            toy_node(network, "n0", LayerSpan(0, 2)) as (node, _),
            toy_node(network, "n1", LayerSpan(2, 4)),
            toy_node(network, "n2", LayerSpan(4, 6)),
            toy_client(network) as client,
            toy_client(network, "untrusted") as untrusted,
        ):
            await begin(client, [1, 2, 3])
            await untrusted.send("n0", Reroute(A, 9, "untrusted", "untrusted"))
            assert (await untrusted.message()).error == "protocol"  # type: ignore[union-attr]
            await client.send("n0", line_step(A, 1, 3, [1]))
            assert isinstance(await client.message(), StepResult)  # nothing has happened
            await client.send("n0", msgspec.structs.replace(message, replay=message.replay and message.replay + 1))
            answer = await client.message()
            assert isinstance(answer, SessionFailed)
            assert answer.error == error
            assert node.sessions == (1 if error == "unknown_session" else 0)

    scenario()
