"""Markdown in a terminal while it grows: what is drawn, and that nothing is drawn twice in the scrollback."""

from __future__ import annotations

import contextlib
import io
import random
import re

import pytest
from rich.console import Console
from rich.markdown import Markdown

from swarm_client.cli.answer_display import AnswerDisplay, complete_length

ANSWER = """# Tides

The sea rises and falls twice a day.

1. The moon pulls the water.

2. The earth turns below it.

   That takes a day.

```python
def tide(hours):

    return hours % 12
```

Both together make the tides, which are highest when sun and moon pull alike. That is called a spring tide.
"""
_ESCAPE = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\[\?\d+[hl]")


class Terminal(io.StringIO):
    """As much of a terminal as is needed to see what is left on it: lines with a scrollback, and a cursor."""

    def __init__(self, height: int) -> None:
        super().__init__()
        self.height, self.lines, self.row = height, [""], 0

    def write(self, text: str) -> int:
        at = 0
        while at < len(text):
            escape = _ESCAPE.match(text, at)
            if escape:
                self._move(escape)
                at = escape.end()
                continue
            if text[at] == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif text[at] != "\r":  # lines are erased before they are written again
                self.lines[self.row] += text[at]
            at += 1
        return len(text)

    def _move(self, escape: re.Match[str]) -> None:
        if escape[2] == "A":
            top = len(self.lines) - self.height  # what scrolled away is out of reach
            self.row = max(self.row - int(escape[1] or 1), top, 0)
        elif escape[2] == "K":
            self.lines[self.row] = ""


def shown(text: str, chunks: list[str], height: int) -> list[str]:
    terminal = Terminal(height)
    console = Console(file=terminal, width=60, height=height, force_terminal=True, color_system=None)
    with AnswerDisplay(console) as display:
        for chunk in chunks:
            display.add(chunk)
            display._live.refresh()
    assert "".join(chunks) == text
    return [line.rstrip() for line in terminal.lines if line.strip()]


@pytest.mark.parametrize("height", [4, 8, 14, 60])
@pytest.mark.parametrize("seed", range(3))
def test_each_line_is_left_once_in_any_window(height: int, seed: int) -> None:
    draw, chunks, at = random.Random(seed), list[str](), 0
    while at < len(ANSWER):
        step = draw.randint(1, 9)
        chunks.append(ANSWER[at : at + step])
        at += step
    whole = io.StringIO()
    Console(file=whole, width=60, color_system=None).print(Markdown(ANSWER))
    lines = [line.rstrip() for line in whole.getvalue().splitlines() if line.strip()]
    assert shown(ANSWER, chunks, height) == lines


def test_what_is_complete_ends_before_a_new_block() -> None:
    assert complete_length("one\n") == 0
    assert complete_length("one\n\n") == 0  # a list item or an indented line may follow
    assert complete_length("one\n\ntwo") == len("one\n\n")
    assert complete_length("one\n\n\n  two\n\nthree") == len("one\n\n\n  two\n\n")
    assert complete_length("- a\n\n- b\n\n  c\n") == 0
    assert complete_length("```\na\n\nb\n") == 0
    assert complete_length("```\na\n\nb\n```\n\nend of it") == len("```\na\n\nb\n```\n\n")


def test_a_long_answer_is_read_in_little_time() -> None:
    """Each chunk looks at the incomplete rest alone."""
    text = "word " * 2_000
    assert complete_length(text + "\n\n" + "another") == len(text) + 2


def test_an_error_leaves_what_had_come() -> None:
    terminal = Terminal(10)
    console = Console(file=terminal, width=60, height=10, force_terminal=True, color_system=None)
    with contextlib.suppress(KeyError), AnswerDisplay(console) as display:
        display.add("half an ans")
        raise KeyError
    assert any("half an ans" in line for line in terminal.lines)
