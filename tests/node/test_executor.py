"""Batches on a real thread: the loop stays free, errors stay with their step, nothing is lost at the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from node_fakes import ROWS, ToyEngine
from virtual_clock import virtual_time

from swarm.errors import InvalidRequest, ResourceError
from swarm.messages import OpenSession, Step
from swarm.planner.scheduling.fair_shares import Share
from swarm.planner.scheduling.layer_time import BatchStats
from swarm.planner.scheduling.work_model import WorkModel
from swarm.types import CostCurve, LayerSpan
from swarm_hop.serving.compute_device import InlineDevice, ThreadDevice
from swarm_hop.serving.executor import Compute, Executor, ScheduledStep
from swarm_hop.serving.session import HopSession, InboundStep

WHOLE = LayerSpan(0, ROWS.num_layers)


class NoLink:
    peer = "client"

    async def send(self, *message: object) -> None:
        raise AssertionError("an executor sends nothing")


def session(key: int) -> HopSession:
    message = OpenSession(bytes([key]) * 16, "toy", "hash", "fp32", WHOLE.start, WHOLE.end, 50)
    return HopSession.of(message, NoLink(), key, ROWS)


def arrival(token: int = 1, rows: int = 1) -> InboundStep:
    return InboundStep(Step(b"s" * 16, 0, 0, 0, rows, tokens=[token] * rows), b"")


class SlowEngine(ToyEngine):
    """Holds the device until the test lets go."""

    def __init__(self) -> None:
        super().__init__(WHOLE)
        self.began = threading.Event()
        self.go = threading.Event()
        self.threads: set[int] = set()

    def prepare(self, works: Sequence[ScheduledStep]) -> Compute:
        compute = super().prepare(works)

        def slowly() -> Sequence[object]:
            self.threads.add(threading.get_ident())
            self.began.set()
            assert self.go.wait(30)
            return compute()

        return slowly  # type: ignore[return-value]


async def test_the_loop_is_free_while_the_device_computes_and_latecomers_share_the_next_batch() -> None:
    engine, stats = SlowEngine(), list[BatchStats]()
    executor = Executor(engine, ThreadDevice(), 512, stats.append)
    first = asyncio.create_task(executor.run(session(0), arrival()))
    assert await asyncio.to_thread(engine.began.wait, 30)
    rest = [asyncio.create_task(executor.run(session(k), arrival(k))) for k in (1, 2, 3)]
    await asyncio.sleep(0.02)
    assert not first.done()
    assert executor.waiting_rows == 3
    engine.go.set()
    outcomes = await asyncio.gather(first, *rest)
    assert [o.output.tokens for o in outcomes] == [(7,), (7,), (8,), (9,)]
    assert engine.batches == [1, 3]
    assert [(s.steps, s.decode_steps, s.rows) for s in stats] == [(1, 1, 1), (3, 3, 3)]
    assert threading.get_ident() not in engine.threads
    assert all(o.queue_ms >= 0 and o.compute_ms >= 0 for o in outcomes)
    await executor.close()


async def test_a_refused_step_fails_alone() -> None:
    engine = ToyEngine(WHOLE, refuse_key=1)
    executor = Executor(engine, ThreadDevice(), 512)
    runs = (executor.run(session(k), arrival()) for k in range(3))
    outcomes = await asyncio.gather(*runs, return_exceptions=True)
    assert [isinstance(o, InvalidRequest) for o in outcomes] == [False, True, False]
    await executor.close()


async def test_a_broken_device_fails_the_batch_and_serves_the_next() -> None:
    engine = ToyEngine(WHOLE, fail=RuntimeError("out of everything"))
    executor = Executor(engine, ThreadDevice(), 512)
    with pytest.raises(ResourceError, match="the device failed: out of everything"):
        await executor.run(session(0), arrival())
    engine.fail = None
    assert (await executor.run(session(1), arrival())).output.tokens == (7,)
    await executor.close()


async def test_cancelled_steps_are_dropped() -> None:
    engine = SlowEngine()
    executor = Executor(engine, ThreadDevice(), 512)
    running = asyncio.create_task(executor.run(session(0), arrival()))
    assert await asyncio.to_thread(engine.began.wait, 30)
    waiting = asyncio.create_task(executor.run(session(1), arrival()))
    await asyncio.sleep(0)
    waiting.cancel()
    running.cancel()
    engine.go.set()
    await executor.close()
    assert engine.batches == [1]


async def test_prefill_does_not_raise_tau() -> None:
    stats: list[BatchStats] = []
    executor = Executor(ToyEngine(WHOLE), ThreadDevice(), 512, stats.append)
    await executor.run(session(0), arrival(rows=5))
    assert [s.decode_steps for s in stats] == [0]
    await executor.close()


def gathering(delay_s: float = 0.01) -> tuple[Executor, ToyEngine]:
    engine = ToyEngine(WHOLE)
    for key in range(3):
        engine.admit(key, 10)
    return Executor(engine, InlineDevice(delay_s), 100, clock=asyncio.get_running_loop().time), engine


async def later(executor: Executor, seconds: float, member: HopSession) -> float:
    """Run a step `seconds` from now; -> when it was done, loop time."""
    await asyncio.sleep(seconds)
    await executor.run(member, arrival())
    return asyncio.get_running_loop().time()


@virtual_time
async def test_sessions_that_decoded_together_wait_briefly_for_each_other() -> None:
    executor, engine = gathering()
    pair = [session(0), session(1)]
    await asyncio.gather(*(later(executor, 0.0, member) for member in pair))
    started = asyncio.get_running_loop().time()
    done = await asyncio.gather(later(executor, 0.0, pair[0]), later(executor, 0.002, pair[1]))
    assert engine.batches == [2, 2]
    assert max(done) - started == pytest.approx(0.012)  # begun when the second came, not when patience ended
    await executor.close()


@virtual_time
async def test_the_batch_wait_is_bounded_and_not_repeated() -> None:
    executor, engine = gathering()
    pair = [session(0), session(1)]
    await asyncio.gather(*(later(executor, 0.0, member) for member in pair))
    started = asyncio.get_running_loop().time()
    assert await later(executor, 0.0, pair[0]) - started == pytest.approx(0.025)  # a batch and a half of patience
    started = asyncio.get_running_loop().time()
    assert await later(executor, 0.0, pair[0]) - started == pytest.approx(0.010)
    assert engine.batches == [2, 1, 1]
    await executor.close()


@virtual_time
async def test_a_session_that_ended_is_not_waited_for() -> None:
    executor, engine = gathering()
    pair = [session(0), session(1)]
    await asyncio.gather(*(later(executor, 0.0, member) for member in pair))
    assert (await executor.run(pair[0], arrival())).sessions == 2
    await asyncio.gather(*(later(executor, 0.0, member) for member in pair))
    executor.forget(pair[1].key)
    started = asyncio.get_running_loop().time()
    assert (await executor.run(pair[0], arrival())).sessions == 1
    assert asyncio.get_running_loop().time() - started == pytest.approx(0.010)
    last = asyncio.create_task(executor.run(pair[1], arrival()))
    await asyncio.sleep(0.005)
    pair[1].closed = True  # while its step is computed
    await last
    assert (await executor.run(pair[0], arrival())).sessions == 1
    assert engine.batches == [2, 1, 2, 1, 1, 1]
    await executor.close()


@virtual_time
async def test_sessions_that_follow_each_other_do_not_wait_for_each_other() -> None:
    executor, engine = gathering()
    for _ in range(3):
        for member in (session(0), session(1), session(2)):
            started = asyncio.get_running_loop().time()
            assert await later(executor, 0.0, member) - started == pytest.approx(0.010)
    assert engine.batches == [1] * 9
    await executor.close()


class LayeredEngine(ToyEngine):
    """Its batches take 10 ms a layer, and say which layers of which sessions have run when."""

    def __init__(self) -> None:
        super().__init__(WHOLE)
        self.ran: list[tuple[int, int]] = []  # session, layers so far
        self.layers = 0

    def min_layers(self, part: LayerSpan) -> int:
        return 1

    def prepare(self, works: Sequence[ScheduledStep]) -> Compute:
        whole, engine, key = super().prepare(works), self, works[0].session.key

        class Layers:
            done = 0

            def run_layers(self, count: int) -> Any:
                self.done = min(self.done + count, len(WHOLE))
                engine.ran.append((key, self.done))
                engine.layers += count
                return whole() if self.done >= len(WHOLE) else None

            def __call__(self) -> Any:
                return self.run_layers(len(WHOLE))

        return Layers()


class LayeredDevice(InlineDevice):
    """Takes 10 ms of the loop's time for each layer."""

    def __init__(self, engine: LayeredEngine) -> None:
        super().__init__()
        self._engine = engine

    def run_parts(self, part: Any) -> Any:
        return asyncio.get_running_loop().create_task(self._parts(part))

    async def _parts(self, part: Any) -> Any:
        begun, result = self._engine.layers, None
        while result is None:
            before = self._engine.layers
            result = part()
            await asyncio.sleep(0.01 * (self._engine.layers - before))
        return result, 10.0 * (self._engine.layers - begun)


def of_share(key: int, share: Share) -> HopSession:
    made = session(key)
    made.share = share
    return made


@virtual_time
async def test_a_step_of_who_is_behind_waits_for_one_layer_of_who_is_ahead() -> None:
    engine = LayeredEngine()
    for key in range(3):
        engine.admit(key, 100)
    clock = asyncio.get_running_loop().time
    work = WorkModel(CostCurve((1, 64), (10.0, 10.0)))
    executor = Executor(engine, LayeredDevice(engine), 512, clock=clock, work=work)
    attacker, honest = of_share(0, Share("a", "a")), of_share(1, Share("h", "h"))
    for _ in range(3):  # it has got much, and the honest one is known
        await executor.run(attacker, arrival())
    await executor.run(honest, arrival())
    engine.ran.clear()
    long = asyncio.create_task(executor.run(attacker, arrival()))
    await asyncio.sleep(0.015)
    before = engine.ran[-1][1]
    outcome = await executor.run(honest, arrival())
    assert outcome.queue_ms <= 2 * 10.0 + 1e-6, "it waits for the layer that runs"
    assert not long.done()
    await long
    others = [done for key, done in engine.ran if key == 0]
    assert others == sorted(set(others)), "no layer runs twice"
    assert others[-1] >= len(WHOLE)
    assert before < len(WHOLE)
    await executor.close()


@virtual_time
async def test_exclusive_work_runs_between_batches_not_between_layers() -> None:
    engine = LayeredEngine()
    for key in range(2):
        engine.admit(key, 100)
    executor = Executor(engine, LayeredDevice(engine), 512, clock=asyncio.get_running_loop().time)
    running = asyncio.create_task(executor.run(session(0), arrival()))
    await asyncio.sleep(0.005)
    seen: list[int] = []
    await executor.run_exclusive(lambda: seen.append(engine.ran[-1][1]))
    assert seen == [len(WHOLE)]
    await running
    await executor.close()
