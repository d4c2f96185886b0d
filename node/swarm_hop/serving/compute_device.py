"""Where batches are computed: a thread, or for a virtual clock the event loop itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

T = TypeVar("T")


class ComputeDevice(Protocol):
    """Where computations run, one at a time."""

    def run(self, compute: Callable[[], T]) -> asyncio.Future[T]: ...

    def run_parts(self, part: Callable[[], T | None]) -> asyncio.Future[tuple[T, float]]:
        """Call `part` until it returns something. -> that, and how many ms all parts took."""
        ...

    def close(self) -> None:
        """Called when nothing runs."""
        ...


class ThreadDevice:
    """One thread that lives as long as the node."""

    def __init__(self, name: str = "swarm-compute") -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def run(self, compute: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, compute)

    def run_parts(self, part: Callable[[], T | None]) -> asyncio.Future[tuple[T, float]]:
        return self.run(partial(_run_parts, part, time.perf_counter))

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


class InlineDevice:
    """Computes in the event loop, `delay_s` after the call: deterministic, for a virtual clock."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s

    def run(self, compute: Callable[[], T]) -> asyncio.Future[T]:
        # A task is a future with the computation's own error in it; the executor awaits it before it closes.
        return asyncio.get_running_loop().create_task(self._run(compute), name="batch")

    def run_parts(self, part: Callable[[], T | None]) -> asyncio.Future[tuple[T, float]]:
        loop = asyncio.get_running_loop()
        return loop.create_task(self._run(partial(_run_parts, part, loop.time, loop.time())), name="batch")

    async def _run(self, compute: Callable[[], T]) -> T:
        await asyncio.sleep(self._delay_s)
        return compute()

    def close(self) -> None:
        """Nothing to release."""


def _run_parts(
    part: Callable[[], T | None], clock: Callable[[], float], started: float | None = None
) -> tuple[T, float]:
    started = clock() if started is None else started
    while (result := part()) is None:
        """The next one."""
    return result, (clock() - started) * 1e3
