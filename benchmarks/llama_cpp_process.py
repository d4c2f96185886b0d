"""llama.cpp in a process of its own (`llama_cpp_timing.py`), timed step by step beside ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kernel_timing import Timed

LLAMA_PYTHON = "SWARM_LLAMA_PYTHON"
"""Environment variable: a Python that has llama-cpp-python, if this one has not."""


def is_installed() -> bool:
    return subprocess.run([_python(), "-c", "import llama_cpp"], capture_output=True, check=False).returncode == 0


@contextmanager
def llama_cpp(model: Path, threads: int, context: int, rows: Sequence[int]) -> Iterator[dict[int, Timed] | None]:
    """A step of the GGUF file `model` by its number of rows, tokens to logits of all rows, other tokens each time; None
    if llama.cpp does not start."""
    command = [_python(), str(Path(__file__).with_name("llama_cpp_timing.py")), str(model), str(threads), str(context)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        requests, replies = process.stdin, process.stdout
        assert requests is not None
        assert replies is not None
        turn = iter(range(1 << 62))

        def step(count: int) -> Timed:
            def run() -> float:
                requests.write(f"{count} {next(turn) * count}\n")
                requests.flush()
                return float(replies.readline())

            return run

        yield {count: step(count) for count in rows} if replies.readline() == "ready\n" else None
        requests.close()


def _python() -> str:
    return os.environ.get(LLAMA_PYTHON, sys.executable)
