"""Structured concurrency for hivemind: each of its tasks is cancelled with the task that created it.

Owns that bond, as a stand-in for the `asyncio` that hivemind's modules see. Its DHT starts searches without keeping a
reference, and leaks a task for each of their cancelled workers, which waits for an event that never comes. Knows
nothing of searches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class CancelWithParent:
    """`asyncio`, but for `create_task`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def create_task(self, work: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        """As asyncio's, and cancelled when the calling task is."""
        child, parent = asyncio.create_task(work, **options), asyncio.current_task()
        if parent is not None:

            def on_parent_done(parent: asyncio.Task[Any]) -> None:
                if parent.cancelled():
                    child.cancel()

            parent.add_done_callback(on_parent_done)
            child.add_done_callback(lambda _: parent.remove_done_callback(on_parent_done))
        return child
