"""Tasks of a library that lets go of them: each ends at the latest when the task that made it is cancelled.

Owns that bond, as a stand-in for the `asyncio` that the library's modules see. hivemind's DHT begins searches that
nobody holds, and leaves a task behind for each of their workers that is cancelled, to wait for an event that never
comes. Knows nothing of searches.
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

            def ended(maker: asyncio.Task[Any]) -> None:
                if maker.cancelled():
                    child.cancel()

            parent.add_done_callback(ended)
            child.add_done_callback(lambda _: parent.remove_done_callback(ended))
        return child
