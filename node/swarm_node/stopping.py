"""Running work that a stop request interrupts, and the one error that a failed group of tasks is reported by."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from swarm.errors import SwarmError

T = TypeVar("T")


class Stopped(SwarmError):
    """A stop was requested before the work was done."""

    code = "stopped"
    exit_code = 0


@contextlib.contextmanager
def first_of_group() -> Iterator[None]:
    """Raise one error in place of an exception group: the first SwarmError in it, else the first of any kind."""
    try:
        yield
    except BaseExceptionGroup as errors:
        raise _first_error(errors) from None


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors.subgroup(SwarmError) or errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or Stopped as soon as `stop` is set; then `work` is cancelled and has ended."""
    with first_of_group():
        async with asyncio.TaskGroup() as group:
            working = group.create_task(work)
            stopping = group.create_task(stop.wait())
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            working.cancel()
    if working.cancelled():
        raise Stopped("stopped while starting")
    return working.result()
