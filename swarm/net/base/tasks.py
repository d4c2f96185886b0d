"""Tasks that belong to an object rather than to a block of code, and some that run at once and end together.

Owns their end: `close` cancels and awaits every task of the set. An `asyncio.TaskGroup` does this for a block; a
transport or a pool lives longer than any block, and one peer's failed task must not cancel the others. Knows nothing of
what the tasks do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

_T = TypeVar("_T")


class TaskSet:
    """The parent of tasks. A task that fails with an unexpected exception is reported to the loop's handler."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, _T], name: str) -> asyncio.Task[_T]:
        """Run `work` as a child. In a closed set it is cancelled before its first line."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self._name}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        if self._closed:
            task.cancel()
        return task

    def cancel(self) -> None:
        """Cancel every child but the calling task, without waiting, and let no other start."""
        self._closed = True
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    async def close(self) -> None:
        """Cancel all children and wait until they have ended. Idempotent; a child may call it."""
        self.cancel()
        current = asyncio.current_task()
        while rest := [task for task in self._tasks if task is not current]:
            await asyncio.wait(rest)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler(
                {"message": f"{task.get_name()} failed", "exception": error, "task": task}
            )


async def run_all(works: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run all at once. Raises the first failure itself, and then the others have been cancelled.

    An `asyncio.TaskGroup` counts the cancellation by which it wakes its own task after a failure, and on Python 3.11
    and 3.12 never takes that back: an `asyncio.timeout` around it then ends in CancelledError. And it prefers a
    child's failure to a cancellation from outside, which would be lost wherever the failure is handled.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    failed: list[asyncio.Task[_T]] = []
    try:
        if tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failed = [task for task in tasks if task in done and (task.cancelled() or task.exception() is not None)]
    finally:
        await end_all(tasks)
    return [task.result() for task in failed or tasks]


@asynccontextmanager
async def in_thread(work: Callable[[], _T]) -> AsyncIterator[asyncio.Future[_T]]:
    """Run what blocks beside the block of `async with`, which may await its result. The thread cannot be stopped, and
    is waited for at the end, so that what it reads from may be closed then."""
    thread = asyncio.get_running_loop().run_in_executor(None, work)
    result = asyncio.shield(thread)  # who is cancelled while awaiting it leaves the thread's own future as it is
    result.add_done_callback(_notice)
    try:
        yield result
    finally:
        await wait_out(thread)


async def wait_out(work: asyncio.Future[Any]) -> None:
    """Wait until `work` has ended, however often the caller is cancelled meanwhile. Its failure has been noticed."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    _notice(work)
    if cancelled is not None:
        raise cancelled


def _notice(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


async def end_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel them and wait until all have ended, however often the caller is cancelled meanwhile. Their failures have
    been noticed."""
    for task in tasks:
        task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while rest := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(rest)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()
    if cancelled is not None:
        raise cancelled
