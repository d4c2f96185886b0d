"""An answer in a terminal while it grows: what is complete is printed once and scrolls away, only the rest is redrawn.

Owns what is drawn, and the keyboard meanwhile. A region taller than the window cannot be redrawn in place: each
repaint would leave a copy in the scrollback. So of the rest only the end that fits is drawn until it is complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.spinner import Spinner

REFRESH_HZ = 12
_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_CONTINUES = re.compile(r"\s|[-*+](\s|$)|\d+[.)](\s|$)|[>|#`~]?$")  # a line that may belong to the block before it


def complete_length(text: str) -> int:
    """How much of `text`, from its beginning, are markdown blocks that nothing after it can change.

    Blocks end at a blank line outside a code fence if the line after it begins something new: it is not indented, and
    no list item, so that a list stays one block.
    """
    end, at, fence, after_blank = 0, 0, "", False
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n") and len(line) < 3:
            break  # the beginning of a line does not tell yet what it is
        mark = _FENCE.match(line)
        if not fence and after_blank and not _CONTINUES.match(line):
            end = at
        if mark:
            if not fence:
                fence = mark[1]
            elif mark[1].startswith(fence) and not line.strip(" \n`~"):
                fence = ""
        after_blank = not fence and not line.strip()
        at += len(line)
    return end


@dataclass(frozen=True, slots=True)
class LastLines:
    """The end of `content` that fits the window, with a line to spare for the cursor."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.content, options, pad=False)
        for line in lines[-max(1, console.size.height - 1) :]:
            yield from line
            yield Segment.line()


class AnswerDisplay:
    """A context: `add` what comes; all of it is printed at the end, also after an error."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""  # what is not complete yet
        self._live = Live(Spinner("dots"), console=console, refresh_per_second=REFRESH_HZ, transient=True)

    def __enter__(self) -> AnswerDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.update("")
        self._live.stop()
        if self._text.strip():
            self._console.print(Markdown(self._text))

    def add(self, text: str, waiting: str = "") -> None:
        """`waiting`: why nothing comes just now."""
        self._text += text
        if done := complete_length(self._text):
            self._live.console.print(Markdown(self._text[:done]))
            self._live.console.print()
            self._text = self._text[done:]
        note = f"\n\n*waiting: {waiting}*" if waiting else ""
        if self._text or note:
            self._live.update(LastLines(Markdown(self._text + note)))


@contextlib.contextmanager
def without_echo() -> Iterator[None]:
    """What is typed meanwhile is not shown, and waits for the next prompt as it was typed. Ctrl-C works."""
    if sys.stdin is None or not sys.stdin.isatty() or os.getpgrp() != os.tcgetpgrp(sys.stdin.fileno()):
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    quiet = termios.tcgetattr(keyboard)
    quiet[0] &= ~termios.ICRNL  # Enter stays Enter
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(keyboard, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSANOW, before)
