"""llama.cpp to measure beside, held to an instruction set: `python benchmarks/llama_cpp_build.py [NAME ...]`.

Compiling it takes many minutes, so this takes the libraries that `node-llama-cpp` publishes: llama.cpp's release with a
CPU library for each instruction set. The bindings are those of `llama-cpp-python`. Each instruction set gets a folder
that a Python imports `llama_cpp` from; nothing of it enters this one's environment. Owns the folder `llama.cpp` in
`swarm.config.data_dir()`. x86-64 Linux, with npm.
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

BINDINGS, LIBRARIES = "0.3.36", "3.22.1"  # of llama-cpp-python and @node-llama-cpp/linux-x64: llama.cpp 0.5.0
INSTRUCTIONS = {"avx2": "haswell", "avx512": "skylakex", "avx512vnni": "icelake", "avx512bf16": "zen4"}
"""ggml's CPU libraries, by the names that `dispatch.select_isa` takes: neither side uses more than that."""

_LOADS_ONE_CPU = """
import ctypes as _ctypes
import os as _os
_libraries = _os.path.join(_os.path.dirname(_os.path.abspath(__file__)), "lib")
_ggml = _ctypes.CDLL(_os.path.join(_libraries, "libggml.so"))
_ggml.ggml_backend_load.restype = _ctypes.c_void_p
if not _ggml.ggml_backend_load(_os.path.join(_libraries, "libggml-cpu.so").encode()):
    raise ImportError("this machine lacks the instructions")
"""


def environment(name: str) -> dict[str, str]:
    """This process's environment for a Python that imports llama.cpp held to `name`; fetches it if it is not there.

    Raises OSError and CalledProcessError if it cannot be fetched.
    """
    return {**os.environ, "PYTHONPATH": str(package(name))}


def built(name: str) -> dict[str, str] | None:
    """As `environment`, if it is there already."""
    return environment(name) if (_home() / name).exists() else None


def _home() -> Path:
    return data_dir() / "llama.cpp" / f"{BINDINGS}-{LIBRARIES}"


def package(name: str) -> Path:
    """The folder with the package `llama_cpp` for instruction set `name`; see `environment`."""
    home = _home()
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / "fetch.lock"):
        if not (home / name).exists():
            unfinished = home / f"{name}.part"
            shutil.rmtree(unfinished, ignore_errors=True)
            _assemble(home, INSTRUCTIONS[name], unfinished)
            unfinished.rename(home / name)
    return home / name


def _assemble(home: Path, variant: str, target: Path) -> None:
    bindings, libraries = _bindings(home) / "llama_cpp", _libraries(home)
    package = target / "llama_cpp"
    shutil.copytree(bindings, package, ignore=shutil.ignore_patterns("lib"))
    (package / "lib").mkdir()
    for library in libraries.glob("*.so"):
        if not library.name.startswith("libggml-cpu"):
            (package / "lib" / library.name).symlink_to(library)
    for name in ("llama", "ggml"):  # the bindings look for them without a version
        (package / "lib" / f"lib{name}.so").symlink_to(next(libraries.glob(f"lib{name}.v*.so")))
    (package / "lib" / "libggml-cpu.so").symlink_to(libraries / f"libggml-cpu-{variant}.so")
    loader = package / "_ctypes_extensions.py"
    lenient = "getattr(lib, name, ctypes.CFUNCTYPE(None)())  # the bindings are a little newer"
    loader.write_text(loader.read_text().replace("getattr(lib, name)", lenient))
    with (package / "__init__.py").open("a") as start:
        start.write(_LOADS_ONE_CPU)
    _run(sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), "--no-deps", "diskcache")


def _bindings(home: Path) -> Path:
    folder = home / f"llama_cpp_python-{BINDINGS}"
    if not folder.exists():
        wanted = f"llama-cpp-python=={BINDINGS}"
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:")
        _run(*pip, "--dest", str(home), wanted)
        _extract(home, "llama_cpp_python-*.tar.gz")
    return folder


def _libraries(home: Path) -> Path:
    folder = home / "package" / "bins" / "linux-x64"
    if not folder.exists():
        _run("npm", "pack", "--silent", "--pack-destination", str(home), f"@node-llama-cpp/linux-x64@{LIBRARIES}")
        _extract(home, "node-llama-cpp-*.tgz")
    return folder


def _extract(home: Path, pattern: str) -> None:
    with tarfile.open(next(home.glob(pattern))) as archive:
        archive.extractall(home, filter="data")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(INSTRUCTIONS)}; by default all")
    args = parser.parse_args()
    for name in args.names or INSTRUCTIONS:
        print(package(name))


if __name__ == "__main__":
    main()
