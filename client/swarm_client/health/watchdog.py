"""Waiting for something while, beside it, somebody looks after what keeps it.

Knows neither what is waited for nor what is looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def wait_with_watchdog(
    work: Coroutine[Any, Any, _T], patience_s: float, look: Callable[[], Awaitable[None]]
) -> _T:
    """Await `work`. Whenever that has taken `patience_s` more, `look` runs beside it, and raises if there is no use in
    waiting on; it never holds up what `work` brings."""
    task = asyncio.ensure_future(work)
    looking: asyncio.Future[None] | None = None
    try:
        while not (await asyncio.wait({task}, timeout=patience_s))[0]:
            looking = asyncio.ensure_future(look())
            await asyncio.wait({task, looking}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                looking.result()
        return task.result()
    finally:
        await _end(*(one for one in (task, looking) if one is not None))


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # a failure that came along with the one being raised
