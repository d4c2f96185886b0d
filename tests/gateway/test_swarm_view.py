"""The gateway's view of a swarm: one poller for all readers, none without readers, and no reader holds up others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from swarm.errors import NetworkError
from swarm.overview import MAX_REASON
from swarm.types import Chain, Hop, LayerSpan, NodeProfile, NodeState, Snapshot
from swarm_gateway.errors import ApiError
from swarm_gateway.swarm_view import watch as watch_module
from swarm_gateway.swarm_view.answers import MAX_REPAIRS, MAX_SHOWN, AnswerBoard
from swarm_gateway.swarm_view.watch import MAX_QUEUED, SwarmWatch

PERIOD_S = 0.01


def profile(peer: str, start: int, end: int) -> NodeProfile:
    return NodeProfile(peer, peer, NodeState.SERVING, "bf16", "h", 8, LayerSpan(start, end))


class FakeSource:
    """A swarm of two nodes, and the number of times that it was read."""

    def __init__(self) -> None:
        self.nodes: tuple[NodeProfile, ...] = (profile("a", 0, 4), profile("b", 4, 8))
        self.reads = 0
        self.error: NetworkError | None = None

    async def snapshot(self) -> Snapshot:
        self.reads += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return Snapshot("name in the directory", 8, self.nodes, float(self.reads))


def watching(source: FakeSource, board: AnswerBoard | None = None, period_s: float = PERIOD_S) -> SwarmWatch:
    return SwarmWatch("toy", source, board or AnswerBoard(), wall_clock=lambda: 0.0, period_s=period_s)


def name_of(event: bytes) -> str:
    return event.partition(b"\n")[0].removeprefix(b"event: ").decode()


def decoded(event: bytes) -> dict[str, Any]:
    assert event.endswith(b"\n\n")
    fields = msgspec.json.decode(event.partition(b"\ndata: ")[2])
    assert isinstance(fields, dict)
    return fields


async def until(events: AsyncGenerator[bytes, None], wanted: Callable[[bytes], bool]) -> dict[str, Any]:
    async with asyncio.timeout(5.0):
        async for event in events:
            if wanted(event):
                return decoded(event)
    raise AssertionError("the events ended")


async def test_an_overview_then_changes() -> None:
    source = FakeSource()
    watch = watching(source)
    async with aclosing(watch.events()) as events:
        first = await anext(events)
        assert name_of(first) == "overview"
        assert decoded(first)["model"] == "toy"
        assert [n["peer"] for n in decoded(first)["nodes"]] == ["a", "b"]
        source.nodes = (profile("a", 0, 6), profile("c", 4, 8))
        change = await until(events, lambda event: name_of(event) == "change" and b'"c"' in event)
        assert [n["peer"] for n in change["joined"]] == ["c"]
        assert change["left"] == ["b"]
        assert change["moved"] == [{"peer": "a", "from": [0, 4], "to": [0, 6]}]
        assert change["coverage"] == [1, 1, 1, 1, 2, 2, 1, 1]
    await watch.close()


async def test_one_poller_for_all_readers_and_none_without() -> None:
    source = FakeSource()
    watch = watching(source)
    readers = [watch.events() for _ in range(10)]
    await asyncio.gather(*(anext(reader) for reader in readers))
    before = source.reads
    for reader in readers:
        assert (await until(reader, lambda event: name_of(event) == "change"))["joined"] == []
    shared = [await asyncio.wait_for(anext(reader), 5.0) for reader in readers]
    assert source.reads - before < 10  # not one for each
    assert len({id(event) for event in shared if name_of(event) == "change"}) <= source.reads  # encoded once
    for reader in readers:
        await reader.aclose()
    assert watch.readers == 0
    stopped = source.reads
    await asyncio.sleep(5 * PERIOD_S)
    assert source.reads <= stopped + 1
    async with aclosing(watch.events()) as events:  # and it starts again
        assert name_of(await anext(events)) == "overview"
        assert name_of(await anext(events)) == "change"
    await watch.close()


async def test_a_slow_reader_skips_to_the_latest_overview() -> None:
    source = FakeSource()
    watch = watching(source)
    slow, quick = watch.events(), watch.events()
    await anext(slow)
    for _ in range(MAX_QUEUED + 5):
        await asyncio.wait_for(anext(quick), 5.0)
    source.nodes = (profile("late", 0, 8),)
    await until(quick, lambda event: b'"late"' in event)
    event = await anext(slow)
    assert name_of(event) == "overview"
    assert [n["peer"] for n in decoded(event)["nodes"]] == ["late"]
    assert name_of(await asyncio.wait_for(anext(slow), 5.0)) == "change"
    await slow.aclose()
    await quick.aclose()
    await watch.close()


async def test_too_many_readers_and_an_unreadable_swarm_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "MAX_READERS", 2)
    source = FakeSource()
    watch = watching(source)
    readers = [watch.events() for _ in range(3)]
    assert [name_of(await anext(reader)) for reader in readers[:2]] == ["overview", "overview"]
    with pytest.raises(ApiError) as refused:
        await watch.admit()
    assert refused.value.status == 429
    with pytest.raises(StopAsyncIteration):
        await anext(readers[2])
    for reader in readers:
        await reader.aclose()
    source.error = NetworkError("no peer answers")
    with pytest.raises(ApiError) as unreadable:
        await watch.admit()
    assert unreadable.value.status == 502
    assert watch.readers == 0
    await watch.close()


async def test_a_swarm_that_cannot_be_read_for_a_while_is_read_again() -> None:
    source = FakeSource()
    watch = watching(source)
    async with aclosing(watch.events()) as events:
        await anext(events)
        source.error = NetworkError("no peer answers")
        await asyncio.sleep(3 * PERIOD_S)
        source.error, source.nodes = None, (profile("back", 0, 8),)
        change = await until(events, lambda event: b'"back"' in event)
        assert change["left"] == ["a", "b"]
    await watch.close()


async def test_answers_come_at_once_and_only_of_this_model() -> None:
    board = AnswerBoard()
    watch = watching(FakeSource(), board, period_s=60.0)
    async with aclosing(watch.events()) as events:
        await anext(events)
        board.started("other", "another model")
        board.progressed("other", chain=Chain((Hop("x", 0, 8),)))
        board.started("mine", "toy", "auto")
        board.progressed("mine", chain=Chain((Hop("a", 0, 4), Hop("b", 4, 8))))
        event = await asyncio.wait_for(anext(events), 5.0)
        assert name_of(event) == "answer"
        assert decoded(event) == {
            "id": "mine",
            "model": "toy",
            "chain": [{"peer": "a", "start": 0, "end": 4}, {"peer": "b", "start": 4, "end": 8}],
            "tokens": 0,
            "tokens_per_second": 0.0,
            "strategy": "auto",
            "state": "waiting",
            "repairs": [],
        }
        assert [answer.id for answer in (await watch.overview()).answers] == ["mine"]
    await watch.close()


def test_an_answer_s_life() -> None:
    now = 0.0
    board = AnswerBoard(lambda: now)
    told: list[Any] = []
    board.listen(told.append)
    chain = Chain((Hop("a", 0, 4), Hop("b", 4, 8)))
    board.started("1", "toy")
    for _ in range(5):
        now += 0.5
        board.progressed("1", chain=chain, tokens=2)
    (answer,) = board.of("toy")
    assert (answer.state, answer.tokens, answer.tokens_per_second) == ("writing", 10, 4.0)
    assert len(told) == 1  # its chain; tokens are told with the next change
    board.progressed("1", waiting="hop \x1b[31mb is lost")
    assert told[-1].state == "waiting"
    board.progressed("1", chain=replace(chain, hops=(Hop("a", 0, 4), Hop("c", 4, 8))), tokens=1)
    assert told[-1].state == "writing"
    assert told[-1].repairs == ("waiting: hop [31mb is lost", "b [4:8] replaced by c [4:8]")
    board.ended("1")
    board.ended("1")
    board.progressed("1", tokens=1)
    assert board.of("toy") == ()
    board.unlisten(told.append)


def test_the_board_is_bounded() -> None:
    board = AnswerBoard()
    for number in range(2 * MAX_SHOWN):
        board.started(str(number), "toy")
    assert len(board.of("toy")) == MAX_SHOWN
    for number in range(100):
        board.progressed("0", chain=Chain((Hop(f"{number}" * 1000, 0, 8),)), waiting="x" * 10_000)
        board.progressed("0", tokens=1)
    repairs = board.of("toy")[0].repairs
    assert len(repairs) == MAX_REPAIRS
    assert max(map(len, repairs)) <= MAX_REASON
