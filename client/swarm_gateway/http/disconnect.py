"""Work for a caller who may hang up: it is cancelled when the connection is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from swarm_gateway.errors import ApiError

_T = TypeVar("_T")


async def gone(receive: Receive) -> None:
    """Returns when the caller has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, whose body has been read; cancels it if the caller hangs up. Raises ApiError 499 then,
    which nobody reads."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(499, "cancelled", "the caller closed the connection")
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
