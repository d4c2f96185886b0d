"""Happy eyeballs (RFC 8305): several connection attempts to one peer, started one after the other; the first wins.

Owns the race: the losers are cancelled, and closed if they connect at the same moment. Knows neither addresses nor
transports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from swarm.errors import PeerUnreachable, WrongSwarm

_C = TypeVar("_C")


async def staggered_race(
    attempts: Sequence[Callable[[], Awaitable[_C]]], stagger_s: float, discard: Callable[[_C], None]
) -> _C:
    """The result of the first of `attempts` to succeed; each starts `stagger_s` after the previous one, or as soon as
    one fails.

    `discard` closes late results. Raises PeerUnreachable if all attempts do: WrongSwarm if there is one, else the error
    of the last attempt.
    """
    results: list[_C] = []
    errors: dict[int, PeerUnreachable] = {}

    async def run(number: int, attempt: Callable[[], Awaitable[_C]]) -> None:
        try:
            results.append(await attempt())
        except PeerUnreachable as error:
            errors[number] = error

    running: set[asyncio.Task[None]] = set()
    won = False
    try:
        async with asyncio.TaskGroup() as group:
            for number, attempt in enumerate(attempts):
                running.add(group.create_task(run(number, attempt)))
                _, running = await asyncio.wait(running, timeout=stagger_s, return_when=asyncio.FIRST_COMPLETED)
                if results:
                    break
            while running and not results:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in running:
                task.cancel()
        won = bool(results)
    finally:
        for late in results[won:]:
            discard(late)
    if won:
        return results[0]
    raise max(errors.items(), key=lambda item: (isinstance(item[1], WrongSwarm), item[0]))[1]
