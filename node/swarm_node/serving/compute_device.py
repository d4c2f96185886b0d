"""Where batches are computed: a thread, or for a virtual clock the event loop itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class ComputeDevice(Protocol):
    """Where computations run, one at a time."""

    def run(self, compute: Callable[[], T]) -> asyncio.Future[T]: ...

    def close(self) -> None:
        """Called when nothing runs."""
        ...


class ThreadDevice:
    """One thread that lives as long as the node."""

    def __init__(self, name: str = "swarm-compute") -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def run(self, compute: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, compute)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


class InlineDevice:
    """Computes in the event loop, `delay_s` after the call: deterministic, for a virtual clock."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s

    def run(self, compute: Callable[[], T]) -> asyncio.Future[T]:
        # A task is a future with the computation's own error in it; the executor awaits it before it closes.
        return asyncio.get_running_loop().create_task(self._run(compute), name="batch")

    async def _run(self, compute: Callable[[], T]) -> T:
        await asyncio.sleep(self._delay_s)
        return compute()

    def close(self) -> None:
        """Nothing to release."""
