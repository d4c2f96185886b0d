"""A process that times steps of llama.cpp, for measurements in turn: a model file in, a `Timed` for each batch out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count as count_from
from pathlib import Path

from kernel_timing import Timed

LLAMA_PYTHON = "SWARM_LLAMA_PYTHON"
"""Environment variable: a Python that has llama-cpp-python, if this one has not."""


@dataclass(frozen=True)
class LlamaCpp:
    """A step of tokens to logits of all rows, by its number of rows; `logits()`: the first of the next token's."""

    steps: dict[int, Timed]
    logits: Callable[[], list[float]]


def other_tokens(turn: int, rows: int, vocabulary: int) -> range:
    """Of step `turn` with so many rows: others than those of the steps before, until the vocabulary is used up."""
    first = turn * rows % (vocabulary - rows)
    return range(first, first + rows)


@contextmanager
def llama_cpp(
    model: Path,
    threads: int,
    context: int,
    rows: Sequence[int],
    environment: Mapping[str, str] | None = None,
    vocabulary: int = 0,
) -> Iterator[LlamaCpp | None]:
    """`model` with `context` tokens, 1000 and up, in its cache. `vocabulary`: if not 0, every step has other tokens of
    the last of so many.

    `environment`: of a build of `llama_cpp_build`, otherwise what the Python of `LLAMA_PYTHON` imports. None if it is
    not installed or does not start.
    """
    python = sys.executable if environment else os.environ.get(LLAMA_PYTHON, sys.executable)
    probe = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, check=False, env=environment)
    if probe.returncode != 0:
        yield None
        return
    script = Path(__file__).with_name("llama_cpp_timing.py")
    command = [python, str(script), str(model), str(threads), str(context)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        requests, replies = process.stdin, process.stdout
        assert requests is not None
        assert replies is not None

        def ask(request: object) -> str:
            requests.write(f"{request}\n")
            requests.flush()
            return replies.readline()

        turns = count_from(0)

        def step(count: int) -> float:
            return float(ask(f"{count} {other_tokens(next(turns), count, vocabulary)[0]}" if vocabulary else count))

        steps: dict[int, Timed] = {count: partial(step, count) for count in rows}
        started = replies.readline() == "ready\n"
        yield LlamaCpp(steps, lambda: [float(value) for value in ask("logits").split()]) if started else None
        requests.close()
