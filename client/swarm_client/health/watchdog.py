"""Waiting for a result with a watchdog: a check that runs beside the wait whenever it takes too long.

Knows neither what is waited for nor what is checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from swarm.net.base.tasks import end_all

_T = TypeVar("_T")


async def wait_with_watchdog(
    work: Coroutine[Any, Any, _T], timeout_s: float, check: Callable[[], Awaitable[None]]
) -> _T:
    """Await `work`. Whenever that has taken `timeout_s` more, `check` runs beside it, and raises if waiting on is
    useless; it never delays the result of `work`."""
    task = asyncio.ensure_future(work)
    checking: asyncio.Future[None] | None = None
    try:
        while not (await asyncio.wait({task}, timeout=timeout_s))[0]:
            checking = asyncio.ensure_future(check())
            await asyncio.wait({task, checking}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                checking.result()
        return task.result()
    finally:
        await end_all([one for one in (task, checking) if one is not None])
