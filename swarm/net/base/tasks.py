"""Tasks that belong to an object rather than to a block of code.

Owns their end: `close` cancels and awaits every task of the set. An `asyncio.TaskGroup` does this for a block; a
transport or a pool lives longer than any block, and one peer's failed task must not cancel the others. Knows nothing of
what the tasks do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
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
