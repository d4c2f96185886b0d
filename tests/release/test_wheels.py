"""What a wheel brings: every module and data file, compiled kernels that are found without a compiler. The wheels
themselves are built and tried by `make wheels` (docs/guide/packages.md)."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from swarm import __version__
from swarm.extras import NODE_PACKAGES
from swarm_kernels.ops.cpu import build, compile

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "swarm": ".",
    "swarm_hop": "node",
    "swarm_node": "node",
    "swarm_kernels": "kernels",
    **dict.fromkeys(("swarm_client", "swarm_gateway", "swarm_training", "swarm_privacy"), "client"),
}
OLDEST_GLIBC = (2, 34)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in {*(PACKAGES[name] for name in PACKAGES if PACKAGES[name] != "."), "swarm"}:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-q", "-w", folder, tree]
    environment = {**os.environ, "SWARM_WHEEL": "pure", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_without_compiled_parts_has_everything_else(pure_wheel: Path) -> None:
    assert pure_wheel.name == f"swarm_llm-{__version__}-py3-none-any.whl"
    there = set(zipfile.ZipFile(pure_wheel).namelist())
    wanted = set()
    for name, top in PACKAGES.items():
        folder = ROOT / top
        for kind in ("*.py", "*.cpp", "*.h", "*.draft", "py.typed", "*.html", "*.js", "*.css"):
            wanted |= {str(file.relative_to(folder)) for file in (folder / name).rglob(kind)}
    assert len(wanted) > 500
    assert wanted - there == set()
    assert not [name for name in there if name.endswith(".so")]
    assert f"swarm_llm-{__version__}.dist-info/licenses/LICENSE" in there


@pytest.mark.slow
def test_a_client_needs_no_package_of_nodes(pure_wheel: Path) -> None:
    with zipfile.ZipFile(pure_wheel) as wheel:
        lines = wheel.read(f"swarm_llm-{__version__}.dist-info/METADATA").decode().splitlines()
    required = [Requirement(line.removeprefix("Requires-Dist: ")) for line in lines if line.startswith("Requires-Dist")]
    base = {one.name for one in required if one.marker is None or one.marker.evaluate({"extra": "client"})}
    node = {one.name for one in required if one.marker is not None and one.marker.evaluate({"extra": "node"})}
    assert node - base >= NODE_PACKAGES
    assert not base & NODE_PACKAGES
    assert {"client", "node", "gpu", "libp2p", "dev"} == {
        line.removeprefix("Provides-Extra: ") for line in lines if line.startswith("Provides-Extra")
    }


@pytest.mark.slow
def test_its_programs_start(pure_wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(pure_wheel).extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    for program in ("swarm_node", "swarm_client", "swarm_gateway"):
        command = [sys.executable, "-P", "-m", program, "--version"]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
        assert said.split()[-1] == __version__


def test_kernels_of_a_wheel_need_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in compile.SOURCES.iterdir():
        if file.suffix in (".cpp", ".h"):
            shutil.copy(file, tmp_path)
    monkeypatch.setattr(compile, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(compile.BuildError, match="no C\\+\\+ compiler"):
        build.library()
    brought = tmp_path / compile.prebuilt_name()
    brought.touch()
    assert build.library() == brought
    (tmp_path / "isa.cpp").write_text("// changed: those kernels are of other sources")
    with pytest.raises(compile.BuildError):
        build.library()


def test_a_wheel_of_another_machine_is_another_file() -> None:
    names = {compile.prebuilt_name(machine) for machine in ("x86_64", "aarch64")}
    assert len(names) == 2
    assert compile.prebuilt_name() == compile.prebuilt_name(platform.machine())


@needs_compiler
@pytest.mark.slow
def test_portable_kernels_need_no_new_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in compile.FLAGS))
    monkeypatch.setattr(compile, "_X86_VARIANTS", {"generic": ()})
    target = tmp_path / "kernels.so"
    compile.compile_library("g++", target, portable=True)
    content = target.read_bytes()
    assert b"swarm_isa" in content
    assert b"libstdc++.so" not in content
    needed = {tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", content)}
    assert needed
    assert max(needed) <= OLDEST_GLIBC
