"""Compiles the CPU kernels into a shared library, once for each machine and version of the sources.

The library has a plain C interface and does not use torch: it compiles in seconds with any GCC or Clang, does not
depend on torch's ABI, and is called through ctypes, which releases the GIL. It is cached in `swarm.config.data_dir()`
by a hash of compiler, flags and sources. `python -m swarm_kernels.ops.cpu.build` builds it ahead of its first use.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

from swarm.config import data_dir

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


class BuildError(Exception):
    """The kernels cannot be compiled on this machine, with the reason. The plain torch reference is used instead."""


def library() -> Path:
    """Path of the compiled library for this machine, built if it is not cached. Raises BuildError.

    Several processes may call it at once: one builds under a file lock, the others wait.
    """
    if os.name != "posix":
        raise BuildError(f"no compiled kernels for {platform.system()} yet")
    compiler = _compiler()
    target = data_dir() / "kernels" / f"swarm-cpu-{_fingerprint(compiler)}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name("build.lock")):
            if not target.exists():
                _compile(compiler, target)
    except OSError as error:
        raise BuildError(f"cannot write to {target.parent}: {error.strerror}") from None
    return target


def _compiler() -> str:
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildError("no C++ compiler found (g++ or clang++)")


def _variants() -> dict[str, tuple[str, ...]]:
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return _X86_VARIANTS if x86 else {"generic": ()}


def _common_flags() -> tuple[str, ...]:
    return (*FLAGS, "-DSWARM_X86") if len(_variants()) > 1 else FLAGS


def _fingerprint(compiler: str) -> str:
    digest = hashlib.sha256()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    for part in (version, platform.machine().encode(), repr((_common_flags(), _variants())).encode()):
        digest.update(part + b"\0")
    for file in sorted(SOURCES.iterdir()):
        if file.suffix in (".cpp", ".h"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, target: Path) -> None:
    """Compile all objects in parallel, link to a temporary file, rename it: no process loads a partial library."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        commands = []
        for source in sorted(SOURCES.glob("*.cpp")):
            variants = _variants() if source.stem == "isa" else {"": ()}
            for name, flags in variants.items():
                output = f"{folder}/{source.stem}{name}.o"
                commands.append([compiler, *_common_flags(), *flags, "-c", str(source), "-o", output])
        _run_all(commands)
        objects = [command[-1] for command in commands]
        linked = f"{folder}/linked.so"
        _run_all([[compiler, "-shared", "-pthread", *objects, "-o", linked]])
        os.replace(linked, target)


def _run_all(commands: list[list[str]]) -> None:
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    outputs = [process.communicate()[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        if process.returncode != 0:
            lines = [line for line in output.splitlines() if "error" in line] or output.splitlines() or ["no message"]
            raise BuildError(f"the C++ compiler failed: {lines[0]}")


def main() -> int:
    try:
        path = library()
    except BuildError as error:
        sys.stdout.write(f"CPU kernels: plain torch ({error})\n")
    else:
        sys.stdout.write(f"CPU kernels: {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
