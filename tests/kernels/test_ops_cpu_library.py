"""The compiled library's life: built once, chosen, shared by threads, forked, left at exit."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from swarm.errors import KernelError
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.cpu import build, compile, cpu_library

COMPUTE = """
import os, sys, threading, torch
from swarm_kernels.ops import dispatch as ops
torch.manual_seed(0)
ops.set_threads(3)
linear, x = ops.pack_linear(torch.randn(512, 512)), torch.randn(40, 512)
expected = linear(x)
"""


def run_python(code: str) -> None:
    result = subprocess.run([sys.executable, "-c", COMPUTE + code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_forked_child_computes_and_exits() -> None:
    run_python(
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if torch.equal(linear(x), expected) else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert torch.equal(linear(x), expected)\n"
    )


@pytest.mark.slow
def test_leaving_while_a_thread_computes_is_clean() -> None:
    """The interpreter waits for the thread, the pool's own threads end with the library.

    Not a daemon thread: one that wants the GIL back from torch during shutdown ends the process (torch's frames do not
    let it unwind), whoever computes. The node therefore leaves by `os._exit`.
    """
    run_python("def work():\n    for _ in range(300): linear(x)\nthreading.Thread(target=work).start()\n")


def test_threads_may_call_at_once(isa: str) -> None:
    linear = dispatch.pack_linear(torch.randn(256, 128))
    inputs = [torch.randn(rows, 128) for rows in (1, 5, 30)]
    expected = [linear(x) for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(100):
            if not torch.equal(linear(inputs[index]), expected[index]):
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_other_threads_run_during_an_op() -> None:
    """An op does not hold the GIL: another thread gets on while one long call lasts."""
    before = torch.get_num_threads()
    dispatch.select_isa("generic")
    dispatch.set_threads(1)
    try:
        linear, x = dispatch.pack_linear(torch.zeros(2048, 2048)), torch.zeros(256, 2048)
        finished: list[float] = []
        worker = threading.Thread(target=lambda: (linear(x), finished.append(time.monotonic())))
        worker.start()
        seen: list[float] = []
        while not finished:
            seen.append(time.monotonic())
            time.sleep(0.001)
        worker.join()
    finally:
        dispatch.select_isa("best")
        dispatch.set_threads(before)
    assert len(seen) > 3


def test_implementations_are_chosen_by_name() -> None:
    best = dispatch.isa()
    assert dispatch.describe() == f"compiled ({best})"
    dispatch.select_isa("generic")
    assert dispatch.isa() == "generic"
    dispatch.select_isa("reference")
    assert dispatch.isa() == "reference"
    assert dispatch.describe().startswith("plain torch: ")
    dispatch.select_isa("best")
    assert dispatch.isa() == best
    with pytest.raises(KernelError):
        dispatch.select_isa("abacus")
    with pytest.raises(KernelError):
        dispatch.set_threads(0)


def fresh_selection(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("SWARM_HOME", str(home))
    monkeypatch.setattr(cpu_library, "_selection", cpu_library._Selection())


def test_without_a_compiler_plain_torch_takes_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_selection(monkeypatch, tmp_path)
    monkeypatch.setattr(compile.shutil, "which", lambda name: None)
    assert dispatch.describe() == "plain torch: no C++ compiler found (g++ or clang++)"
    linear = dispatch.pack_linear(torch.eye(16))
    assert torch.equal(linear(torch.ones(2, 16)), torch.ones(2, 16))
    with pytest.raises(KernelError):
        dispatch.select_isa("generic")


def test_a_failing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_selection(monkeypatch, tmp_path)
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'error: out of ink' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(compile.shutil, "which", lambda name: str(compiler))
    assert "out of ink" in dispatch.describe()


def test_a_home_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    fresh_selection(monkeypatch, file / "home")
    assert "cannot write to" in dispatch.describe()


def test_a_damaged_library_is_not_fatal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_selection(monkeypatch, tmp_path)
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"not a library")
    monkeypatch.setattr(build, "library", lambda: damaged)
    assert "does not load" in dispatch.describe()


def test_one_builds_while_the_others_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    built: list[Path] = []

    def compile_slowly(compiler: str, target: Path) -> None:
        time.sleep(0.05)
        built.append(target)
        target.write_bytes(b"")

    monkeypatch.setattr(build, "compile_library", compile_slowly)
    found: list[Path] = []
    workers = [threading.Thread(target=lambda: found.append(build.library())) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(built) == 1
    assert found == built * 4
