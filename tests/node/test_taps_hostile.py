"""Taps that a node must refuse, and that a node without them sends none."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_fakes import LAYERS, ToyEngine, line_step, open_message, serving, toy_client
from virtual_clock import virtual_time

from swarm import codec
from swarm.errors import ProtocolError
from swarm.messages import SessionFailed, SessionOpened, StepResult
from swarm.tap_messages import TapRows, WireTaps, skipped_rows
from swarm.testing.memory_network import LinkModel, MemoryNetwork
from swarm.types import MAX_TAPS, LayerSpan, tapped_row_bytes
from swarm_hop.serving.session import check_taps

A = b"a" * 16
HOPS = [("node", 0, LAYERS)]


@pytest.mark.parametrize(
    "taps",
    [
        WireTaps([], 8),
        WireTaps([LAYERS + 1], 8),
        WireTaps([], 8, onward=True),
        WireTaps([3, 2], 8),
        WireTaps([2, 2], 8),
        WireTaps([1 << 20], 16),
    ],
)
@virtual_time
async def test_taps_that_are_not_here_break_the_protocol(taps: WireTaps) -> None:
    network = MemoryNetwork(link=LinkModel(0.001))
    async with serving(network, "node", ToyEngine(LayerSpan(0, LAYERS))) as service, toy_client(network) as client:
        message = open_message(A, HOPS, 0, 0, LAYERS)
        await client.send("node", msgspec.structs.replace(message, taps=taps))
        answer = await client.message()
        assert isinstance(answer, SessionFailed)
        assert "taps" in answer.detail
        assert (service.sessions, service.counters.protocol_errors) == (0, 1)
        await client.send("node", message)
        assert isinstance(await client.message(), SessionOpened)
        await client.send("node", line_step(A, 0, 0, [1, 2]))
        assert isinstance(await client.message(), StepResult)


@pytest.mark.parametrize(
    ("layers", "bits", "first"),
    [(list(range(MAX_TAPS + 1)), 8, 0), ([-1], 8, 0), ([1], 4, 0), ([1], 8, -1), ([1], 8, 1 << 30)],
)
def test_taps_out_of_bounds_are_no_message(layers: list[int], bits: int, first: int) -> None:
    message = open_message(A, HOPS, 0, 0, LAYERS)
    header, _ = codec.encode(msgspec.structs.replace(message, taps=WireTaps(layers, bits, first)))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError):
        codec.decode(header[codec.PREFIX.size :])


@given(st.lists(st.integers(0, 12), min_size=1, max_size=MAX_TAPS), st.integers(0, 5), st.integers(1, 4))
def test_a_hop_has_the_taps_of_its_layers_and_the_tail_one_more(layers: list[int], start: int, count: int) -> None:
    for num_layers in (start + count, start + count + 1):
        span = LayerSpan(start, start + count)
        there = set(range(start, start + count + (span.end == num_layers)))
        if layers == sorted(set(layers)) and set(layers) <= there:
            check_taps(WireTaps(layers, 8), span, num_layers, tail=False)
        else:
            with pytest.raises(ProtocolError):
                check_taps(WireTaps(layers, 8), span, num_layers, tail=False)


@virtual_time
async def test_taps_are_not_for_a_node_to_receive() -> None:
    network = MemoryNetwork(link=LinkModel(0.001))
    async with serving(network, "node", ToyEngine(LayerSpan(0, LAYERS))) as service, toy_client(network) as client:
        await client.open(A, HOPS)
        await client.send("node", TapRows(A, 0, 0, 1), b"x" * 10)
        assert isinstance(await client.message(), SessionFailed)
        assert service.counters.protocol_errors == 1


def test_how_many_rows_and_bytes() -> None:
    assert [skipped_rows(start, 4, 10) for start in (0, 6, 7, 9, 10, 50)] == [4, 4, 3, 1, 0, 0]
    assert skipped_rows(0, 0, 10) == 0
    assert [tapped_row_bytes(*size) for size in ((4096, 16), (4096, 8), (65, 8))] == [8192, 4096 + 128, 65 + 4]
