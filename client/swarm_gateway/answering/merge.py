"""Several choices of one answer as one stream of events, in the order in which they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

_T = TypeVar("_T")

BUFFERED = 16  # events, of all choices together: how far they may run ahead of their reader


async def merged(choices: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[tuple[int, _T], None]:
    """(number of the choice, event). An error of one ends all; every choice is closed in any case."""
    if len(choices) == 1:
        async with aclosing(choices[0]) as only:
            async for event in only:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, _T]] = asyncio.Queue(BUFFERED)

    async def feed(index: int, choice: AsyncGenerator[_T, None]) -> None:
        async with aclosing(choice) as events:
            async for event in events:
                await queue.put((index, event))

    feeding = [asyncio.ensure_future(feed(index, choice)) for index, choice in enumerate(choices)]
    try:
        waiting = set(feeding)
        while waiting or not queue.empty():
            getting = asyncio.ensure_future(queue.get())
            try:
                await asyncio.wait({getting, *waiting}, return_when=asyncio.FIRST_COMPLETED)
                for done in [task for task in waiting if task.done()]:
                    waiting.remove(done)
                    done.result()
                if getting.done():
                    yield getting.result()
            finally:
                getting.cancel()
    finally:
        for task in feeding:
            task.cancel()
        await asyncio.gather(*feeding, return_exceptions=True)
