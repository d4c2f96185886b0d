"""A node whose client holds the embedding, or the norm and the head: hidden states come in, and go back to it."""

from __future__ import annotations

import msgspec
import pytest
from node_fakes import LAYERS, ToyEngine, line_step, open_message, serving, toy_client
from virtual_clock import virtual_time

from swarm.messages import Reroute, SessionFailed, SessionOpened, Step
from swarm.testing.memory_network import LinkModel, MemoryNetwork
from swarm.types import LayerSpan

A = b"a" * 16
AROUND = [("client", 0, 0), ("node", 0, LAYERS), ("client", LAYERS, LAYERS)]  # as the node sees its chain


@virtual_time
async def test_rows_come_in_and_go_back_as_hidden_states() -> None:
    network = MemoryNetwork(link=LinkModel(0.001))
    async with serving(network, "node", ToyEngine(LayerSpan(0, LAYERS))), toy_client(network) as client:
        await client.send("node", open_message(A, AROUND, 1, 0, LAYERS))
        opened = await client.message()
        assert isinstance(opened, SessionOpened)
        assert opened.client_relays_next_edge
        step = msgspec.structs.replace(line_step(A, 0, 0, [1, 2]), tokens=[])
        await client.send("node", step, bytes([1, 2]))
        _, answer, body = await client.next()
        assert isinstance(answer, Step)
        assert (answer.tokens, answer.step, len(answer.trace)) == ([], 0, 1)
        assert body == bytes([1 + LAYERS, 2 + LAYERS])


@virtual_time
async def test_ids_are_refused_where_hidden_states_were_agreed() -> None:
    network = MemoryNetwork(link=LinkModel(0.001))
    async with serving(network, "node", ToyEngine(LayerSpan(0, LAYERS))) as service, toy_client(network) as client:
        await client.send("node", open_message(A, AROUND, 1, 0, LAYERS))
        assert isinstance(await client.message(), SessionOpened)
        await client.send("node", line_step(A, 0, 0, [1, 2]))
        failed = await client.message()
        assert isinstance(failed, SessionFailed)
        assert failed.error == "protocol"
        assert service.sessions == 0


@pytest.mark.parametrize(
    ("start", "end", "downstream", "error"),
    [
        (0, LAYERS, "somebody", "protocol"),  # who would be sent hidden states that nobody asked for
        (0, LAYERS - 1, "", "protocol"),
        (1, 1, "client", "no_route"),  # no layers: a session that does nothing
        (LAYERS, LAYERS, "", "no_route"),
    ],
)
@virtual_time
async def test_nobody_else_gets_the_last_states_and_no_session_is_empty(
    start: int, end: int, downstream: str, error: str
) -> None:
    network = MemoryNetwork(link=LinkModel(0.001))
    async with serving(network, "node", ToyEngine(LayerSpan(0, LAYERS))) as service, toy_client(network) as client:
        message = msgspec.structs.replace(open_message(A, AROUND, 1, start, end), downstream=downstream)
        await client.send("node", message)
        failed = await client.message()
        assert isinstance(failed, SessionFailed)
        assert failed.error == error
        assert service.sessions == 0


@virtual_time
async def test_a_session_whose_client_samples_cannot_become_one_that_is_sampled_here() -> None:
    network = MemoryNetwork(link=LinkModel(0.001))
    async with serving(network, "node", ToyEngine(LayerSpan(0, LAYERS))) as service, toy_client(network) as client:
        await client.send("node", open_message(A, AROUND, 1, 0, LAYERS))
        assert isinstance(await client.message(), SessionOpened)
        await client.send("node", Reroute(A, 1, "client", ""))
        failed = await client.message()
        assert isinstance(failed, SessionFailed)
        assert failed.error == "protocol"
        assert service.sessions == 0
