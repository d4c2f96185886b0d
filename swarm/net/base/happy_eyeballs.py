"""Several ways to one peer: the next is tried when those before take long or fail, and the first that leads there wins.

Owns the race ("happy eyeballs", RFC 8305): its losers are cancelled, and closed if they arrive at the same moment.
Knows neither addresses nor transports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from swarm.errors import PeerUnreachable, WrongSwarm

_C = TypeVar("_C")


async def staggered_race(
    ways: Sequence[Callable[[], Awaitable[_C]]], stagger_s: float, discard: Callable[[_C], None]
) -> _C:
    """What the first of `ways` leads to; each begins `stagger_s` after the one before it, or as soon as one fails.

    `discard` closes what came too late. Raises PeerUnreachable if all of them do: the error that says why we are not
    let in, else that of the last way.
    """
    results: list[_C] = []
    errors: dict[int, PeerUnreachable] = {}

    async def attempt(number: int, way: Callable[[], Awaitable[_C]]) -> None:
        try:
            results.append(await way())
        except PeerUnreachable as error:
            errors[number] = error

    running: set[asyncio.Task[None]] = set()
    won = False
    try:
        async with asyncio.TaskGroup() as group:
            for number, way in enumerate(ways):
                running.add(group.create_task(attempt(number, way)))
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
