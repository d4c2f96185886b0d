"""A node that holds experts for others: what it computes for whom, and what strangers get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from node_fakes import LIMITS, ToyClient, toy_client
from tiny_models import ModelTensors, tiny_model
from virtual_clock import virtual_time

from swarm.errors import InvalidRequest, NodeBusy, ProtocolError
from swarm.expert_messages import ExpertOutputs, ExpertRows, ExpertsRefused
from swarm.messages import AnyMessage
from swarm.net.base.transport import Connection
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.testing.memory_network import MemoryNetwork
from swarm.types import ExpertShare, LayerSpan, ModelId, PeerId
from swarm_hop.experts.expert_exchange import ExpertExchange, Holder, _Batch
from swarm_hop.experts.expert_service import ExpertService
from swarm_hop.experts.policy import ExpertPolicy
from swarm_hop.experts.rows import outputs_from_wire, pairs_of_frame, rows_from_wire, rows_to_wire
from swarm_hop.serving.compute_device import InlineDevice
from swarm_kernels.runtime.load import load_experts
from swarm_kernels.runtime.mixture_reader import ExpertSpan

SERVED = ModelId("tiny", "h" * 32, "fp32")
LAYERS, EXPERTS, HIDDEN = LayerSpan(0, 2), range(2, 6), 96


@cache
def experts() -> ExpertSpan:
    model = tiny_model("qwen3_moe", num_hidden_layers=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
                       moe_intermediate_size=32)  # fmt: skip
    return load_experts(ModelTensors(model), LAYERS, EXPERTS, torch.float32)


@dataclass
class Holding:
    service: ExpertService
    pool: ConnectionPool
    leaders: set[PeerId]


@asynccontextmanager
async def holder(
    network: MemoryNetwork, policy: ExpertPolicy = ExpertPolicy(), delay_s: float = 0.01
) -> AsyncIterator[Holding]:
    transport, leaders = network.transport("holder"), {"client"}

    async def leads(peer: PeerId) -> bool:
        return peer in leaders

    service = ExpertService(SERVED, leads, 5.0, policy)

    async def on_frame(link: Connection, message: AnyMessage, body: memoryview) -> None:
        assert isinstance(message, ExpertRows)
        service.on_rows(link, message, body)

    async with ConnectionPool(transport, on_frame, limits=LIMITS, uses=lambda peer: peer in leaders) as pool:
        service.begin(experts(), InlineDevice(delay_s))
        await pool.serve()
        yield Holding(service, pool, leaders)
        await service.close()
    await transport.close()


def question(
    number: int = 1,
    layer: int = 1,
    rows: int = 2,
    of: tuple[int, ...] = (0, 1, 1),
    wanted: tuple[int, ...] = (2, 3, 5),
    **changes: Any,
) -> tuple[ExpertRows, bytes]:
    fields = {"weight_hash": SERVED.weight_hash, "dtype": SERVED.dtype, "pairs": len(of), **changes}
    message = ExpertRows(number, layer, rows, **fields)
    return message, rows_to_wire(inputs(rows), torch.tensor(of), torch.tensor(wanted), torch.float32)


def inputs(rows: int) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(3))


@virtual_time
async def test_outputs_come_back_one_by_one() -> None:
    network = MemoryNetwork()
    async with holder(network) as held, toy_client(network) as client:
        await client.send("holder", *question())
        _, message, body = await client.next()
        assert message == ExpertOutputs(1)
        expected = experts().outputs(1, inputs(2), torch.tensor([0, 1, 1]), torch.tensor([2, 3, 5]))
        assert torch.equal(outputs_from_wire(body, 3, HIDDEN), expected)
        assert held.service.computed == 3


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"weight_hash": "x" * 32}, "wrong_model"),
    "another format": ({"dtype": "int8"}, "wrong_model"),
    "another layer": ({"layer": 2}, "invalid_request"),
    "an expert that is not here": ({"wanted": (2, 3, 6)}, "invalid_request"),
    "an expert that there is not": ({"wanted": (2, 3, 4000)}, "invalid_request"),
}


@pytest.mark.parametrize(("changes", "code"), REFUSED.values(), ids=REFUSED)
@virtual_time
async def test_what_cannot_be_computed_is_refused_in_a_sentence(changes: dict[str, Any], code: str) -> None:
    network = MemoryNetwork()
    async with holder(network) as held, toy_client(network) as client:
        await client.send("holder", *question(**changes))
        message = await client.message()
        assert isinstance(message, ExpertsRefused)
        assert message.error == code
        assert message.detail
        await client.send("holder", *question(2))  # and all else goes on
        assert await client.message() == ExpertOutputs(2)
        assert held.service.refused == 1


@virtual_time
async def test_who_leads_nothing_gets_nothing() -> None:
    network = MemoryNetwork()
    async with holder(network) as held, toy_client(network) as client:
        held.leaders.clear()
        await client.send("holder", *question())
        message = await client.message()
        assert isinstance(message, ExpertsRefused)
        assert message.error == InvalidRequest.code
        assert held.service.computed == 0
        await held.service.end()
        held.leaders.add("client")
        await client.send("holder", *question())
        message = await client.message()
        assert isinstance(message, ExpertsRefused)
        assert message.error == "leaving"


WRONG: dict[str, Callable[[], tuple[ExpertRows, bytes]]] = {
    "a short body": lambda: (question()[0], question()[1][:-1]),
    "a long body": lambda: (question()[0], question()[1] + b"x"),
    "no body": lambda: (question()[0], b""),
    "more pairs than it has": lambda: (question(pairs=4)[0], question()[1]),
    "a row that it has not": lambda: question(of=(0, 1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@virtual_time
async def test_what_no_leader_sends_costs_the_connection(wrong: Callable[[], tuple[ExpertRows, bytes]]) -> None:
    network = MemoryNetwork()
    async with holder(network) as held, toy_client(network) as client:
        await client.send("holder", *wrong())
        await asyncio.sleep(1)
        assert client.lost == ["holder"]
        assert held.pool.violations.counts == {"client": 1}
        assert held.service.computed == 0


@virtual_time
async def test_a_flood_is_refused_and_then_not_even_that() -> None:
    network = MemoryNetwork()
    async with (
        holder(network, ExpertPolicy(max_waiting_per_leader=4), delay_s=1.0) as held,
        toy_client(network) as client,
    ):
        for number in range(40):
            await client.send("holder", *question(number))
        answers = [await client.message() for _ in range(4 + 4)]
        refused = [m for m in answers if isinstance(m, ExpertsRefused)]
        assert {m.error for m in refused} == {NodeBusy.code}
        assert len(refused) == 4
        assert await client.quiet(5)
        assert held.service.computed == 4 * 3
        await client.send("holder", *question(99))
        assert await client.message() == ExpertOutputs(99)


def test_bodies_are_checked() -> None:
    message, body = question()
    x, rows, wanted = rows_from_wire(message, body, HIDDEN, torch.float32)
    assert torch.equal(x, inputs(2))
    assert rows.tolist() == [0, 1, 1]
    assert wanted.tolist() == [2, 3, 5]
    with pytest.raises(ProtocolError):
        rows_from_wire(message, body, HIDDEN, torch.bfloat16)
    with pytest.raises(ProtocolError):
        outputs_from_wire(bytes(4 * HIDDEN), 2, HIDDEN)
    assert pairs_of_frame(7168, 1 << 20) == 36
    assert pairs_of_frame(1 << 20, 1) == 1


# The leader's side, against holders that are written by hand ------------------------------------------------------

Answer = Callable[[ToyClient, ExpertRows, bytes], Coroutine[Any, Any, None]]


@asynccontextmanager
async def leader(
    network: MemoryNetwork, policy: ExpertPolicy = ExpertPolicy(stall_s=1.0)
) -> AsyncIterator[ExpertExchange]:
    transport = network.transport("leader")
    exchanges: list[ExpertExchange] = []

    async def on_frame(link: Connection, message: AnyMessage, body: memoryview) -> None:
        exchange = exchanges[0]
        if isinstance(message, ExpertOutputs):
            exchange.on_outputs(link.peer, message, body)
        elif isinstance(message, ExpertsRefused):
            exchange.on_refused(link.peer, message)

    async def on_lost(link: Connection, error: Exception) -> None:
        exchanges[0].on_lost(link.peer)

    async with ConnectionPool(transport, on_frame, on_lost, LIMITS) as pool:
        exchanges.append(ExpertExchange(pool, SERVED, HIDDEN, torch.float32, policy=policy))
        await pool.serve()
        yield exchanges[0]
        await exchanges[0].close()
    await transport.close()


@asynccontextmanager
async def answering(network: MemoryNetwork, name: str, answer: Answer) -> AsyncIterator[list[ExpertRows]]:
    """A peer that calls `answer` for each question."""
    asked: list[ExpertRows] = []
    async with toy_client(network, name) as peer:

        async def go_on() -> None:
            while True:
                _, message, body = await peer.inbox.get()
                assert isinstance(message, ExpertRows)
                asked.append(message)
                await answer(peer, message, body)

        await peer.pool.serve()
        task = asyncio.create_task(go_on())
        yield asked
        task.cancel()


async def honest(peer: ToyClient, message: ExpertRows, body: bytes) -> None:
    x, rows, wanted = rows_from_wire(message, body, HIDDEN, torch.float32)
    outputs = x[rows] * (1 + wanted[:, None])
    await peer.send("leader", ExpertOutputs(message.request), outputs.numpy().tobytes())


async def wrong_size(peer: ToyClient, message: ExpertRows, body: bytes) -> None:
    await peer.send("leader", ExpertOutputs(message.request), b"123")


async def no_numbers(peer: ToyClient, message: ExpertRows, body: bytes) -> None:
    outputs = torch.full((message.pairs, HIDDEN), float("nan"))
    await peer.send("leader", ExpertOutputs(message.request), outputs.numpy().tobytes())


async def refuse(peer: ToyClient, message: ExpertRows, body: bytes) -> None:
    await peer.send("leader", ExpertsRefused(message.request, "busy", "no"))


async def nothing(peer: ToyClient, message: ExpertRows, body: bytes) -> None:
    """It stalls."""


HOSTILE: list[Answer] = [wrong_size, no_numbers, refuse, nothing]
X, ROWS, WANTED = inputs(3), torch.tensor([0, 0, 1, 2, 2]), torch.tensor([2, 3, 2, 4, 5])


def share(first: int = 0, end: int = 8) -> ExpertShare:
    return ExpertShare(LAYERS, first, end, 8)


@pytest.mark.parametrize("hostile", HOSTILE)
@virtual_time
async def test_another_holder_answers_for_one_that_does_not(hostile: Answer) -> None:
    network = MemoryNetwork()
    async with (
        leader(network) as exchange,
        answering(network, "a", honest) as of_a,
        answering(network, "b", honest),
    ):
        exchange.holders = [Holder("a", share()), Holder("b", share())]
        assert exchange.usable() == []  # nobody is, before it has answered
        await exchange.probe((1,))
        assert [holder.peer for holder in exchange.usable()] == ["a", "b"]
        assert [message.layer for message in of_a] == [1]
        batch = await _outputs(exchange)
        assert torch.equal(batch, X[ROWS] * (1 + WANTED[:, None]))
    async with leader(network) as exchange, answering(network, "c", hostile), answering(network, "d", honest):
        exchange.holders = [Holder("c", share()), Holder("d", share())]
        exchange._proven |= {"c", "d"}  # it answered once
        assert torch.equal(await _outputs(exchange), X[ROWS] * (1 + WANTED[:, None]))
        assert [holder.peer for holder in exchange.usable()] == ["d"]
        assert exchange.counters.failures == 1
        await exchange.probe((0, 1))
        assert [holder.peer for holder in exchange.usable()] == ["d"]  # it is not tried again at once


@pytest.mark.parametrize("hostile", HOSTILE)
@virtual_time
async def test_without_another_the_step_fails_and_is_told_when_to_come_back(hostile: Answer) -> None:
    network = MemoryNetwork()
    async with leader(network) as exchange, answering(network, "a", hostile):
        exchange.holders = [Holder("a", share()), Holder("gone", share())]
        exchange._proven |= {"a", "gone"}
        with pytest.raises(NodeBusy, match="lost"):
            await _outputs(exchange)
        assert exchange.counters.lost == 1
        assert exchange.usable() == []


@virtual_time
async def test_answers_of_others_are_violations_and_late_ones_are_dropped() -> None:
    network = MemoryNetwork()
    async with leader(network) as exchange, answering(network, "a", nothing):
        exchange.holders = [Holder("a", share())]
        exchange._proven.add("a")
        waiting = asyncio.create_task(_outputs(exchange))
        await asyncio.sleep(0.5)
        number = next(iter(exchange._questions))
        with pytest.raises(ProtocolError):
            exchange.on_outputs("b", ExpertOutputs(number), b"")
        with pytest.raises(ProtocolError):
            exchange.on_refused("b", ExpertsRefused(number, "busy", ""))
        with pytest.raises(NodeBusy):
            await waiting
        assert not exchange.on_outputs("a", ExpertOutputs(number), b"")
        assert not exchange.on_refused("a", ExpertsRefused(number, "busy", ""))


@virtual_time
async def test_long_prompts_go_in_frames_of_bounded_size() -> None:
    network = MemoryNetwork()
    policy = ExpertPolicy(reply_bytes=4 * HIDDEN * 3)  # three outputs
    async with leader(network, policy) as exchange, answering(network, "a", honest) as asked:
        exchange.holders = [Holder("a", share())]
        exchange._proven.add("a")
        assert torch.equal(await _outputs(exchange), X[ROWS] * (1 + WANTED[:, None]))
        assert sorted(message.pairs for message in asked) == [2, 3]


@virtual_time
async def test_a_leader_that_stops_leaves_nobody_waiting() -> None:
    network = MemoryNetwork()
    async with leader(network) as exchange, answering(network, "a", nothing):
        exchange.holders = [Holder("a", share())]
        exchange._proven.add("a")
        waiting = asyncio.create_task(_outputs(exchange))
        await asyncio.sleep(0.1)
        await exchange.close()
        await asyncio.wait([waiting], timeout=0.1)
        assert waiting.done()
        with pytest.raises(NodeBusy):
            await _outputs(exchange)


async def _outputs(exchange: ExpertExchange) -> torch.Tensor:
    return await exchange._start(_Batch(1, X, ROWS, WANTED))
