"""Finds the compiled CPU kernels: in the wheel they came with, in the cache, or by compiling them, once for each
machine and version of the sources.

The cache is in `swarm.config.data_dir()`, by a hash of compiler, flags and sources. `python -m
swarm_kernels.ops.cpu.build` builds them ahead of their first use.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from swarm.config import data_dir
from swarm_kernels.ops.cpu.compile import (
    SOURCES,
    BuildError,
    compile_library,
    find_compiler,
    fingerprint,
    prebuilt_name,
)


def library() -> Path:
    """Path of the compiled library for this machine, built if none is there. Raises BuildError.

    Several processes may call it at once: one builds under a file lock, the others wait.
    """
    if os.name != "posix":
        raise BuildError(f"no compiled kernels for {platform.system()} yet")
    prebuilt = SOURCES / prebuilt_name()
    if prebuilt.exists():
        return prebuilt
    compiler = find_compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    target = data_dir() / "kernels" / f"swarm-cpu-{fingerprint('', version)}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name("build.lock")):
            if not target.exists():
                compile_library(compiler, target)
    except OSError as error:
        raise BuildError(f"cannot write to {target.parent}: {error.strerror}") from None
    return target


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
