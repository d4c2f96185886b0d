"""The events of a node for the person or program that started it: one line per event on stdout.

Owns their format: sentences and a progress bar for people, JSON lines for programs. Logs go to stderr instead.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

FETCHING_EVENT_S = 2.0  # between two lines of JSON on what has been fetched


class EventReporter(Protocol):
    def event(self, name: str, sentence: str, **fields: Any) -> None:
        """`sentence` for people; `name` and `fields` for programs."""
        ...

    def loading(self, fraction: float) -> None:
        """Fraction of the weights read so far, 0 to 1. May be called from another thread."""
        ...

    def fetching(self, done: int, total: int) -> None:
        """Bytes of weights that are here, and that this node needs, while some come from a hub. As `loading`."""
        ...

    def __enter__(self) -> EventReporter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class JsonEventReporter:
    """`{"event": ..., "seconds": since the start, ...}`, one a line, written at once."""

    def __init__(self, since: float, stream: TextIO | None = None, clock: Callable[[], float] = time.time) -> None:
        self._since = since
        self._stream = stream or sys.stdout
        self._clock = clock
        self._loaded = 0.0
        self._fetched_at = -math.inf

    def event(self, name: str, sentence: str, **fields: Any) -> None:
        seconds = round(self._clock() - self._since, 3)
        line = json.dumps({"event": name, "seconds": seconds, "message": sentence, **fields})
        self._stream.write(line + "\n")  # one write: lines of the loading thread do not mix with ours
        self._stream.flush()

    def loading(self, fraction: float) -> None:
        if fraction >= self._loaded + 0.1 or fraction >= 1.0 > self._loaded:
            self._loaded = fraction
            self.event("loading", f"{fraction:.0%} of the weights", fraction=round(fraction, 3))

    def fetching(self, done: int, total: int) -> None:
        now = self._clock()
        if done >= total or now >= self._fetched_at + FETCHING_EVENT_S:
            self._fetched_at = now
            self.event("fetching", f"{done / 1e9:.2f} of {total / 1e9:.2f} GB fetched", bytes=done, total=total)

    def __enter__(self) -> JsonEventReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()


class HumanEventReporter:
    """Sentences; while weights are read, a progress bar on a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def event(self, name: str, sentence: str, **fields: Any) -> None:
        self._console.print(sentence, markup=False)

    def loading(self, fraction: float) -> None:
        columns = (TextColumn("loading weights"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        self._show(columns, fraction, 1.0)

    def fetching(self, done: int, total: int) -> None:
        columns = (TextColumn("fetching weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._show((*columns, TimeRemainingColumn()), done, total)

    def _show(self, columns: tuple[ProgressColumn, ...], done: float, total: float) -> None:
        """A bar, if there is a terminal; it goes when all is done."""
        if not self._console.is_terminal:
            return
        if self._progress is None:
            self._progress = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._task = self._progress.add_task("", total=total)
            self._progress.start()
        self._progress.update(self._task, completed=done)
        if done >= total:
            self._stop()

    def __enter__(self) -> HumanEventReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def make(as_json: bool, since: float) -> EventReporter:
    """`since`: when the program started, seconds since the epoch."""
    return JsonEventReporter(since) if as_json else HumanEventReporter()
