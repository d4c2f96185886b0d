"""A draft model that is loaded beside the first tokens: n-grams until it is there, then both, and never a wait."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Sequence

import pytest
from virtual_clock import virtual_time

from swarm.errors import DrafterFailed
from swarm.types import TappedRow, TappedRows, Taps
from swarm_client.speculation.drafter_factory import BUNDLED, DrafterFactory
from swarm_client.speculation.drafters.base import Candidate, Drafter, TokenPath
from swarm_client.speculation.drafters.mixture import MixtureDrafter
from swarm_client.speculation.late_model import QUIET_S, LateDrafter, LateModel


class Counting(Drafter):
    """Says the number of tokens that it knows."""

    extend_is_synchronous = True

    def __init__(self, gate: threading.Event | None = None, broken: bool = False) -> None:
        super().__init__("counting")
        self.gate, self.broken = gate, broken
        self.known = 0
        self.closed = False
        self.rows: dict[int, TappedRow] = {}

    @property
    def taps(self) -> Taps | None:
        return Taps((1,), 4)

    def set_taps(self, rows: TappedRows) -> None:
        self.rows |= rows

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self.known = len(prompt_ids)

    def _advance(self, tokens: Sequence[int]) -> None:
        self.known += len(tokens)

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        if self.gate is not None:
            assert self.gate.wait(10.0)
        if self.broken:
            raise ValueError("no such model")
        return [[Candidate(self.known + len(path), math.log(0.9))] for path in paths]

    def close(self) -> None:
        super().close()
        self.closed = True


def loads(drafter: Drafter, gate: threading.Event | None = None) -> Callable[[], Callable[[], Drafter]]:
    def load() -> Callable[[], Drafter]:
        if gate is not None:
            assert gate.wait(10.0)
        return lambda: drafter

    return load


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_n_grams_draft_until_the_model_has_read_the_text() -> None:
    loading, reading = threading.Event(), threading.Event()
    model = LateModel(loads(inner := Counting(reading), loading))
    late = LateDrafter(model)
    await late.reset([1, 2, 3, 1, 2])
    assert (await late.propose_many([()], 1))[0][0].token == 3  # looked up
    await late.extend([3])
    assert model.make is None, "it is loading since the first token"
    loading.set()
    await until(lambda: model.make is not None)
    await late.extend([1])
    assert (await late.propose_many([()], 1))[0][0].token == 2, "n-grams go on while it reads"
    await late.extend([2, 9])
    reading.set()
    await until(lambda: late._reading is not None and late._reading.done())
    await late.extend([8])
    assert isinstance(late.drafter, MixtureDrafter)
    assert inner.known == 10, "what came while it was reading"
    assert (await late.propose_many([()], 1))[0][0].token == 10
    await late.extend([10])
    assert (await late.propose_many([(4,)], 1))[0][0].token == 12
    late.close()
    await until(lambda: inner.closed)
    await model.close()


async def test_hidden_states_that_come_before_the_model_are_kept_for_it() -> None:
    loading, reading = threading.Event(), threading.Event()
    wanted = Taps((1,), 4)
    model = LateModel(loads(inner := Counting(reading), loading), wanted)
    late = LateDrafter(model)
    assert late.taps == wanted, "a session asks when it opens"
    await late.reset([1, 2, 3])
    await late.extend([4], taps={0: (b"a",), 1: (b"b",)})
    await late.extend([5], taps={3: (b"d",)})
    loading.set()
    await until(lambda: model.make is not None)
    await late.extend([6], taps={4: (b"e",)})
    await late.extend([7], taps={5: (b"f",)})  # it is reading
    reading.set()
    await until(lambda: late._reading is not None and late._reading.done())
    await late.extend([8], taps={6: (b"g",)})
    assert isinstance(late.drafter, MixtureDrafter)
    await late.extend([9], taps={7: (b"h",)})
    assert sorted(inner.rows) == [0, 1, 3, 4, 5, 6, 7]
    late.close()
    await model.close()


async def test_a_model_that_cannot_be_used_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> Callable[[], Drafter]:
        raise DrafterFailed("it is of another model")

    model = LateModel(load)
    with caplog.at_level(logging.WARNING):
        model.start()
        await until(lambda: "it is of another model" in caplog.text)
        assert model.make is None
        await model.close()
        model = LateModel(loads(Counting(broken=True)))
        late = LateDrafter(model)
        await late.reset([1, 2, 3])
        model.start()
        await until(lambda: model.make is not None)
        await late.extend([1])
        await until(lambda: "no such model" in caplog.text)
        await late.extend([2])
        assert (await late.propose_many([()], 1))[0][0].token == 3
    late.close()
    await model.close()


async def test_an_answer_that_ends_while_the_model_reads_closes_it() -> None:
    gate = threading.Event()
    model = LateModel(loads(inner := Counting(gate)))
    model.start()
    await until(lambda: model.make is not None)
    late = LateDrafter(model)
    await late.reset([1])
    await late.extend([2])
    late.close()
    gate.set()
    await until(lambda: inner.closed)
    await model.close()


@virtual_time
async def test_who_asks_nothing_for_a_while_finds_the_model_loaded() -> None:
    model = LateModel(loads(Counting()))
    await asyncio.sleep(QUIET_S - 0.01)
    assert model._thread is None
    await asyncio.sleep(0.02)
    assert model._thread is not None
    await asyncio.sleep(0.1)
    assert model.make is not None
    factory = DrafterFactory(late=model)
    assert isinstance(factory.drafter().drafter, MixtureDrafter), "a generation that begins later has it at once"
    await factory.close()


async def test_closing_waits_for_the_thread_and_starts_none() -> None:
    gate = threading.Event()
    model = LateModel(loads(Counting(), gate))
    model.start()
    closing = asyncio.create_task(model.close())
    await asyncio.sleep(0.02)
    assert not closing.done(), "it reads from a model file that its owner closes next"
    gate.set()
    await closing
    untouched = LateModel(loads(Counting()))
    await untouched.close()
    untouched.start()
    assert untouched._thread is None


async def test_the_bundled_model_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = threading.Event()

    def open_it(*args: object) -> Callable[[], Drafter]:
        loaded.set()
        return Counting

    monkeypatch.setattr("swarm_client.speculation.drafter_factory.find_bundled", lambda target: "a file")
    monkeypatch.setattr("swarm_client.speculation.drafter_factory.taps_of", lambda path, target: Taps((1,), 4))
    monkeypatch.setattr("swarm_client.speculation.drafter_factory._open", open_it)
    factory = await DrafterFactory.load(BUNDLED, None, None)  # type: ignore[arg-type]
    assert not loaded.is_set()
    drafter = factory.drafter()
    assert isinstance(drafter, LateDrafter)
    assert drafter.taps == Taps((1,), 4)
    await drafter.reset([1])
    await drafter.extend([2])
    await until(loaded.is_set)
    drafter.close()
    await factory.close()
