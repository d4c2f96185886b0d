"""llama.cpp to measure beside, built once for each instruction set: `python benchmarks/llama_cpp_build.py [NAME ...]`.

The sources are those that `llama-cpp-python` publishes. Only the CPU library differs between instruction sets, so the
rest is compiled once. Each gets a folder that a Python imports `llama_cpp` from; nothing of it enters this one's
environment. Owns the folder `llama.cpp` in `swarm.config.data_dir()`; needs cmake and a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from filelock import FileLock

from swarm.config import data_dir

VERSION = "0.3.36"  # of llama-cpp-python
_AVX2 = ("AVX", "AVX2", "FMA", "F16C", "BMI2")
_AVX512 = (*_AVX2, "AVX512", "AVX512_VBMI")
INSTRUCTIONS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512vnni": (*_AVX512, "AVX512_VNNI"),
    "avx512bf16": (*_AVX512, "AVX512_VNNI", "AVX512_BF16"),
}
"""ggml's options, by the names that `dispatch.select_isa` takes: neither side uses more than that."""

_BARE = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON"),
    *("-DCMAKE_INSTALL_RPATH=$ORIGIN", "-DGGML_NATIVE=OFF", "-DGGML_LLAMAFILE=ON", "-DGGML_OPENMP=ON"),
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "TOOLS", "SERVER", "COMMON")),
    "-DLLAMA_CURL=OFF",
)


def environment(name: str, jobs: int = 1) -> dict[str, str]:
    """This process's environment for a Python that imports llama.cpp held to `name`; builds it if it is not there.

    Raises OSError and CalledProcessError if it cannot be built.
    """
    return {**os.environ, "PYTHONPATH": str(package(name, jobs))}


def built(name: str) -> dict[str, str] | None:
    """As `environment`, if it is built already."""
    return environment(name) if (_home() / name).exists() else None


def _home() -> Path:
    return data_dir() / "llama.cpp" / VERSION


def package(name: str, jobs: int = 1) -> Path:
    """The folder with the package `llama_cpp` for instruction set `name`; see `environment`."""
    home = _home()
    target = home / name
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / "build.lock"):
        if not target.exists():
            _build(home, name, jobs)
    return target


def _build(home: Path, name: str, jobs: int) -> None:
    source, unfinished = _sources(home), home / f"{name}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    common = _compile(source, home / "build-avx2", INSTRUCTIONS["avx2"], "llama", jobs)
    shutil.copytree(source / "llama_cpp", unfinished / "llama_cpp", ignore=shutil.ignore_patterns("lib"))
    libraries = unfinished / "llama_cpp" / "lib"
    shutil.copytree(common, libraries, symlinks=True)
    if name != "avx2":
        own = _compile(source, home / f"build-{name}", INSTRUCTIONS[name], "ggml-cpu", jobs)
        for library in own.glob("libggml-cpu*"):
            (libraries / library.name).unlink(missing_ok=True)
            shutil.copy2(library, libraries / library.name, follow_symlinks=False)
    _run("pip", "install", "--quiet", "--target", str(unfinished), "--no-deps", "diskcache")
    unfinished.rename(home / name)


def _sources(home: Path) -> Path:
    source = home / f"llama_cpp_python-{VERSION}"
    if not source.exists():
        wanted = f"llama-cpp-python=={VERSION}"
        _run("pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(home), wanted)
        with tarfile.open(next(home.glob("llama_cpp_python-*.tar.gz"))) as archive:
            archive.extractall(home, filter="data")
    return source


def _compile(source: Path, build: Path, options: tuple[str, ...], target: str, jobs: int) -> Path:
    """-> the folder with the libraries."""
    unwanted = {option for options in INSTRUCTIONS.values() for option in options} - set(options)
    switches = [f"-DGGML_{option}={'OFF' if option in unwanted else 'ON'}" for option in sorted({*options, *unwanted})]
    if not (build / "CMakeCache.txt").exists():
        command = ["cmake", "-S", str(source / "vendor" / "llama.cpp"), "-B", str(build), *_BARE, *switches]
        subprocess.run(command, check=True, stdout=sys.stderr)
    command = ["nice", "cmake", "--build", str(build), "--target", target, "--parallel", str(jobs)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return build / "bin"


def _run(*module: str) -> None:
    subprocess.run([sys.executable, "-m", *module], check=True, stdout=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *INSTRUCTIONS], default=list(INSTRUCTIONS))
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time")
    args = parser.parse_args()
    for name in args.names:
        print(package(name, args.jobs))


if __name__ == "__main__":
    main()
