"""Works that run at once: the first failure ends the others, and cancelling the caller always cancels it."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest
from virtual_clock import virtual_time

from swarm.net.base.tasks import in_thread, run_all


async def after(seconds: float, failure: type[Exception] | None = None, on_cancel: float | None = None) -> float:
    """`on_cancel`: when cancelled, it takes so long and fails."""
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        if on_cancel is None:
            raise
        await asyncio.sleep(on_cancel)
        raise ValueError from None
    if failure is not None:
        raise failure
    return seconds


@virtual_time
async def test_results_come_in_order() -> None:
    assert await run_all([after(3.0), after(1.0), after(2.0)]) == [3.0, 1.0, 2.0]
    assert await run_all([]) == []


@virtual_time
async def test_the_first_failure_ends_the_others() -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(KeyError):
        await run_all([after(9.0), after(2.0, KeyError), after(3.0, ValueError), after(9.0, on_cancel=0.5)])
    assert loop.time() == pytest.approx(2.5)
    assert len(asyncio.all_tasks()) == 1


async def timed(timeout_s: float, patience_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        try:
            async with asyncio.timeout(patience_s):
                await run_all([after(1.0, KeyError), after(8.0, on_cancel=0.5), after(8.0)])
        except (KeyError, TimeoutError):
            await asyncio.sleep(9.0)


@virtual_time
async def test_a_callers_timeout_is_one_whenever_it_expires() -> None:
    task = asyncio.current_task()
    assert task is not None
    for timeout_s, patience_s in itertools.product([0.0, 0.5, 1.0, 1.2, 1.5, 2.0, 4.0], [0.5, 1.5, 9.0]):
        with pytest.raises(TimeoutError):
            await timed(timeout_s, patience_s)
        assert task.cancelling() == 0
        assert len(asyncio.all_tasks()) == 1


async def test_work_in_a_thread_is_awaited_beside_the_block_and_waited_for_at_its_end() -> None:
    gate = threading.Event()
    async with in_thread(lambda: gate.wait(10.0)) as work:
        assert not work.done()
        gate.set()
        assert await work
    ended: list[bool] = []

    def slow() -> None:
        ended.append(gate.wait(10.0))

    gate.clear()

    async def block() -> None:
        async with in_thread(slow):
            asyncio.get_running_loop().call_later(0.05, gate.set)
            raise KeyError("of the block")

    with pytest.raises(KeyError):
        await block()
    assert ended == [True]


async def test_a_failure_in_a_thread_is_that_of_who_awaits_it_and_nobody_elses() -> None:
    def fail() -> None:
        raise ValueError("of the thread")

    async with in_thread(fail):
        await asyncio.sleep(0.01)
    async with in_thread(fail) as work:
        with pytest.raises(ValueError, match="of the thread"):
            await work


async def test_cancelling_the_caller_cancels_it_when_the_thread_has_ended() -> None:
    gate, ended = threading.Event(), threading.Event()

    def slow() -> None:
        gate.wait(10.0)
        ended.set()

    async def caller() -> None:
        async with in_thread(slow) as work:
            await work

    task = asyncio.create_task(caller())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
