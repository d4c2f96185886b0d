"""How a command of `swarm-node` runs and ends: signals, sentences, exit codes.

Owns the event loop of a command and its last words. Knows no flag.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import psutil
import typer
import uvloop

from swarm.errors import SwarmError

AT_ONCE_S = 1.0  # that a node which is told to stop at once may take to say goodbye


def run(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run to the end, or until SIGINT or SIGTERM asks to stop; a second one ends what is left at once."""

    async def supervised() -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        task = asyncio.current_task()
        assert task is not None
        signals = 0

        def on_signal() -> None:
            nonlocal signals
            signals += 1
            if signals == 2:
                task.cancel()
                loop.call_later(AT_ONCE_S, end, 130)
            elif signals > 2:
                end(130)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        await main(stop)

    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        runner.run(supervised())
    except asyncio.CancelledError:
        raise typer.Exit(130) from None


class Errors:
    """Turns a SwarmError into one sentence on stderr (and one JSON line on stdout) and its exit code.

    Ends the process there and then: a download or a measurement in some thread must not hold up the exit.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            end(0)
        if isinstance(error, typer.Exit):
            end(error.exit_code)
        if isinstance(error, SwarmError):
            if self._as_json:
                sys.stdout.write(json.dumps({"event": "error", "error": error.code, "message": str(error)}) + "\n")
            sys.stderr.write(f"swarm-node: {error}\n")
            end(error.exit_code)


def end(code: int) -> None:
    """Exit now, and take along what is still running on our behalf, such as a download."""
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
