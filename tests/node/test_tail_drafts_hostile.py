"""Taps and drafts of the tail that nobody asked for, and requests that no honest client makes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_fakes import LAYERS, ToyEngine, line_step, open_message, serving, toy_client
from virtual_clock import virtual_time

from swarm import codec
from swarm.errors import ProtocolError
from swarm.messages import OpenSession, SessionFailed, SessionOpened, StepResult
from swarm.tap_messages import (
    MAX_DRAFT_DEPTH,
    MAX_DRAFT_NODES,
    CarriedTaps,
    EndDrafts,
    TailDraft,
    WireDraft,
    WireTaps,
    children_of,
)
from swarm.testing.memory_network import LinkModel, MemoryNetwork
from swarm.types import FINGERPRINT_BYTES, LayerSpan, tapped_row_bytes

A = b"a" * 16
HOPS = [("first", 0, 4), ("node", 4, LAYERS)]
DRAFT = WireDraft(bytes(FINGERPRINT_BYTES), 8, 4)
ROW = tapped_row_bytes(1, 8)  # of the toy's hidden size


def at_tail(taps: WireTaps | None) -> OpenSession:
    """As if its client were the hop before it, too."""
    return msgspec.structs.replace(open_message(A, HOPS, 1, 4, LAYERS), upstream="", taps=taps)


@pytest.mark.parametrize(
    ("taps", "message", "body"),
    [
        (None, CarriedTaps(A, 0, 0, [1]), b"x" * ROW),
        (WireTaps([5], 8), CarriedTaps(A, 0, 0, [1]), b"x" * ROW),
        (WireTaps([], 8, draft=DRAFT), CarriedTaps(A, 0, 0, [5]), b"x" * ROW),
        (WireTaps([], 8, draft=DRAFT), CarriedTaps(A, 0, 0, [2, 1]), b"x" * 2 * ROW),
        (WireTaps([], 8, draft=DRAFT), CarriedTaps(A, 0, 0, [1, 2]), b"x" * ROW),
        (WireTaps([], 8, draft=DRAFT), CarriedTaps(A, 0, 0, [1]), b"x" * (ROW + 1)),
        (None, TailDraft(A, 0, 0, 3, [1], [-1], [5]), b""),
    ],
    ids=["without taps", "of the client", "its own", "in disorder", "no whole rows", "half a row", "a draft"],
)
@virtual_time
async def test_what_a_session_does_not_carry_breaks_the_protocol(
    taps: WireTaps | None, message: CarriedTaps | TailDraft, body: bytes
) -> None:
    network = MemoryNetwork(link=LinkModel(0.001))
    async with serving(network, "node", ToyEngine(LayerSpan(4, LAYERS))) as service, toy_client(network) as client:
        await client.send("node", at_tail(taps))
        assert isinstance(await client.message(), SessionOpened)
        await client.send("node", message, body)
        assert isinstance(await client.message(), SessionFailed)
        assert service.counters.protocol_errors == 1


@virtual_time
async def test_taps_wait_for_their_steps_and_go_nowhere_once_drafts_have_ended() -> None:
    network = MemoryNetwork(link=LinkModel(0.001))
    async with (
        serving(network, "node", ToyEngine(LayerSpan(4, LAYERS))) as service,
        toy_client(network) as client,
        toy_client(network, "other") as other,
    ):
        await client.send("node", at_tail(WireTaps([], 8, draft=DRAFT)))
        assert isinstance(await client.message(), SessionOpened)
        (session,) = service.live()
        for number in range(200):
            await client.send("node", CarriedTaps(A, 0, number, [1]), b"x" * ROW)
        await client.quiet()
        assert len(session.carried) == 64
        await other.send("node", EndDrafts(A))
        assert isinstance(await other.message(), SessionFailed)
        assert session.taps is not None
        await client.send("node", EndDrafts(A))
        await client.send("node", CarriedTaps(A, 0, 201, [1]), b"x" * ROW)
        step = msgspec.structs.replace(line_step(A, 0, 0, [1, 2]), tokens=[])
        await client.send("node", step, b"\x01\x02")
        assert isinstance(await client.message(), StepResult)
        assert (len(session.carried), session.taps) == (0, None)
        assert service.counters.protocol_errors == 1  # the other client's


@pytest.mark.parametrize(
    ("taps", "start", "hops"),
    [
        (WireTaps([5], 8, onward=True), 4, HOPS),
        (WireTaps([1], 8, draft=DRAFT), 0, [("node", 0, 4), ("last", 4, LAYERS)]),
    ],
    ids=["onward from the tail", "a draft of another hop"],
)
@virtual_time
async def test_only_a_tail_drafts_and_only_others_send_on(
    taps: WireTaps, start: int, hops: list[tuple[str, int, int]]
) -> None:
    network = MemoryNetwork(link=LinkModel(0.001))
    async with serving(network, "node", ToyEngine(LayerSpan(0, LAYERS))), toy_client(network) as client:
        index = [peer for peer, _, _ in hops].index("node")
        message = open_message(A, hops, index, start, hops[index][2])
        await client.send("node", msgspec.structs.replace(message, taps=taps))
        answer = await client.message()
        assert isinstance(answer, SessionFailed)
        assert "tail" in answer.detail


def tree(tokens: list[int], parents: list[int], costs: list[int] | None = None) -> TailDraft:
    return TailDraft(A, 0, 0, 9, tokens, parents, costs if costs is not None else [10 * t for t in tokens])


def test_a_tree_is_read_as_candidates_by_path() -> None:
    found = children_of(tree([7, 3, 4, 4], [-1, -1, 0, 2]), DRAFT, 10)
    assert found == {(): ((3, -0.3), (7, -0.7)), (7,): ((4, -0.4),), (7, 4): ((4, -0.4),)}


@pytest.mark.parametrize(
    "draft",
    [
        tree([1, 2], [-1, 1]),
        tree([1, 2], [-1, 5]),
        tree([1, 1], [-1, -1]),
        tree([1, 10], [-1, 0]),
        tree([1, 2], [-1]),
        tree([1, 2], [-1, 0], [5]),
        tree(list(range(9)), [-1] * 9),
        tree([1, 2, 3, 4, 5], [-1, 0, 1, 2, 3]),
    ],
    ids=[
        "its own parent",
        "a later parent",
        "twice",
        "beyond the vocabulary",
        "parents lack",
        "costs lack",
        "nodes",
        "deep",
    ],
)
def test_what_is_no_such_tree_is_refused(draft: TailDraft) -> None:
    with pytest.raises(ProtocolError):
        children_of(draft, DRAFT, 10)


@pytest.mark.parametrize(
    "draft",
    [
        tree([], []),
        tree([1] * (MAX_DRAFT_NODES + 1), [-1] * (MAX_DRAFT_NODES + 1)),
        tree([-1], [-1], [0]),
        tree([1], [-2]),
        tree([1], [-1], [-1]),
        tree([1], [-1], [1 << 20]),
        msgspec.structs.replace(tree([1], [-1]), took_us=-1),
        msgspec.structs.replace(tree([1], [-1]), position=1 << 40),
    ],
)
def test_drafts_out_of_bounds_are_no_message(draft: TailDraft) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(codec.encode(draft)[0][codec.PREFIX.size :])


@pytest.mark.parametrize(("nodes", "depth"), [(0, 1), (MAX_DRAFT_NODES + 1, 1), (1, 0), (1, MAX_DRAFT_DEPTH + 1)])
def test_requests_out_of_bounds_are_no_message(nodes: int, depth: int) -> None:
    message = at_tail(WireTaps([], 8, draft=WireDraft(bytes(FINGERPRINT_BYTES), nodes, depth)))
    with pytest.raises(ProtocolError):
        codec.decode(codec.encode(message)[0][codec.PREFIX.size :])


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=12),
    st.lists(st.integers(-1, 12), max_size=12),
    st.lists(st.integers(0, 99), max_size=12),
)
def test_any_lists_are_a_tree_or_refused(tokens: list[int], parents: list[int], costs: list[int]) -> None:
    try:
        found = children_of(tree(tokens, parents, costs), DRAFT, 10)
    except ProtocolError:
        return
    assert sum(map(len, found.values())) == len(tokens) <= DRAFT.nodes
    assert max(len(path) for path in found) < DRAFT.depth
