"""The event loop of programs: uvloop's where it is installed, as with nodes. Owns that choice."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` on it."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main)
