"""The virtual clock itself: jumps, order, threads, and tests that would never end."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from virtual_clock import EPOCH, run, virtual_time, wall_clock


@virtual_time
async def test_hours_pass_at_once_and_in_order() -> None:
    woken: list[int] = []

    async def sleeper(hours: int) -> None:
        await asyncio.sleep(hours * 3600)
        woken.append(hours)

    await asyncio.gather(*(sleeper(hours) for hours in (3, 1, 2)))
    assert woken == [1, 2, 3]
    assert wall_clock() == EPOCH + 3 * 3600


@virtual_time
async def test_time_stands_still_while_a_thread_works() -> None:
    async with asyncio.timeout(0.01):
        await asyncio.to_thread(time.sleep, 0.05)
    assert asyncio.get_running_loop().time() < 0.01


def test_what_never_ends_fails() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    async def ticking() -> None:
        for _ in itertools.count():
            await asyncio.sleep(60)

    with pytest.raises(RuntimeError, match="never end"):
        run(forever())
    with pytest.raises(RuntimeError, match="never end"):
        run(ticking())


def test_an_error_in_a_forgotten_task_fails() -> None:
    async def main() -> None:
        async def forgotten() -> None:
            raise ZeroDivisionError

        tasks = {asyncio.ensure_future(forgotten())}
        await asyncio.sleep(1)
        tasks.clear()

    with pytest.raises(ZeroDivisionError):
        run(main())
