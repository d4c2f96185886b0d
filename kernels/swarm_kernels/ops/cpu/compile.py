"""Compiles the CPU kernels into a shared library with a plain C interface; it does not use torch, so any GCC or Clang
compiles it, and it does not depend on torch's ABI.

Only the standard library is imported: `setup.py` runs this file to put the compiled kernels into wheels.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),  # NaN and infinity keep their meaning
)
_AVX512 = (
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
    *("-mtune=skylake-avx512", "-mprefer-vector-width=512"),  # GCC's generic tuning costs a sixth of the speed
)
_X86_VARIANTS = {
    "avx512bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    "avx512vnni": (*_AVX512, "-mavx512vnni"),
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "generic": (),
}
_COMPILERS = ("g++", "clang++", "c++")
# For machines with an older C++ library: what is called of it is linked in; the rest of it would need a newer libc.
_PORTABLE = ("-static-libstdc++", "-s", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections")


class BuildError(Exception):
    """The kernels cannot be compiled on this machine, with the reason. The plain torch reference is used instead."""


def find_compiler() -> str:
    """Path of a C++ compiler. Raises BuildError."""
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildError("no C++ compiler found (g++ or clang++)")


def fingerprint(machine: str = "", *more: bytes) -> str:
    """Of sources and flags for a kind of machine (`platform.machine()`; default: this one), and of what else decides
    what is built."""
    machine = machine or platform.machine()
    digest = hashlib.sha256()
    for part in (*more, machine.encode(), repr((_common_flags(machine), _variants(machine))).encode()):
        digest.update(part + b"\0")
    for file in sorted(SOURCES.iterdir()):
        if file.suffix in (".cpp", ".h"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def prebuilt_name(machine: str = "") -> str:
    """File name of the library beside these sources that a wheel brings for a kind of machine (default: this one). It
    changes with the sources, so that a library of others is never loaded."""
    return f"prebuilt-{fingerprint(machine)}.so"


def compile_library(compiler: str, target: Path, machine: str = "", portable: bool = False) -> None:
    """Compile all objects in parallel, link to a temporary file, rename it: no process loads a partial library.

    machine: what `compiler` compiles for (default: this machine). portable: for other installations too.
    """
    machine = machine or platform.machine()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        commands = []
        for source in sorted(SOURCES.glob("*.cpp")):
            variants = _variants(machine) if source.stem == "isa" else {"": ()}
            for name, flags in variants.items():
                output = f"{folder}/{source.stem}{name}.o"
                commands.append([compiler, *_common_flags(machine), *flags, "-c", str(source), "-o", output])
        _run_all(commands)
        objects = [command[-1] for command in commands]
        linked = f"{folder}/linked.so"
        _run_all([[compiler, "-shared", "-pthread", *(_PORTABLE if portable else ()), *objects, "-o", linked]])
        os.replace(linked, target)


def _variants(machine: str) -> dict[str, tuple[str, ...]]:
    x86 = machine.lower() in ("x86_64", "amd64")
    return _X86_VARIANTS if x86 else {"generic": ()}


def _common_flags(machine: str) -> tuple[str, ...]:
    return (*FLAGS, "-DSWARM_X86") if len(_variants(machine)) > 1 else FLAGS


def _run_all(commands: list[list[str]]) -> None:
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    outputs = [process.communicate()[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        if process.returncode != 0:
            lines = [line for line in output.splitlines() if "error" in line] or output.splitlines() or ["no message"]
            raise BuildError(f"the C++ compiler failed: {lines[0]}")
