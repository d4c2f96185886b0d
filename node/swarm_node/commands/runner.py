"""How a command of `swarm-node` runs and ends: its log, signals, sentences, exit codes.

Owns the event loop of a command, the format of the log on stderr, and its error sentence. The events of a node go to
stdout, by `owner.event_log`.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import psutil
import typer

from swarm.command_line import event_loop
from swarm.errors import SwarmError

PR_SET_PDEATHSIG = 1
FORCED_EXIT_S = 1.0  # that a node may take to end after a second signal


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
                loop.call_later(FORCED_EXIT_S, hard_exit, 130)
            elif signals > 2:
                hard_exit(130)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        await main(stop)

    runner = asyncio.Runner(loop_factory=event_loop.new_event_loop)
    try:
        runner.run(supervised())
    except asyncio.CancelledError:
        raise typer.Exit(130) from None


class exit_on_error:
    """Turns a SwarmError into one sentence on stderr (and one JSON line on stdout) and its exit code.

    Ends the process there and then: a download or a measurement in some thread must not hold up the exit.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            hard_exit(0)
        if isinstance(error, typer.Exit):
            hard_exit(error.exit_code)
        if isinstance(error, SwarmError):
            if self._as_json:
                sys.stdout.write(json.dumps({"event": "error", "error": error.code, "message": str(error)}) + "\n")
            sys.stderr.write(f"swarm-node: {error}\n")
            hard_exit(error.exit_code)


def hard_exit(code: int) -> None:
    """Exit now, and kill child processes that still run, such as a download."""
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_parent() -> None:
    """In a child of ours, before it becomes another program (Linux): get a SIGTERM should this process be killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class JsonFormatter(logging.Formatter):
    """{"time": ISO 8601 in UTC, "level", "logger", "message"} and, if there is one, "error" with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def start_log(verbose: bool, log_format: str = "text") -> None:
    """Log warnings, or with `verbose` also what happens, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler], force=True)
    if not verbose:
        logging.getLogger("swarm.net").setLevel(logging.CRITICAL)  # its errors reach us as exceptions
