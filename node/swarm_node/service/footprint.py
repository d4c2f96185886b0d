"""What this user's programs of swarm have written, for `service uninstall --dry-run` and `--all`."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from swarm.config import data_dir, state_dir
from swarm.errors import ResourceError


@dataclass(frozen=True)
class Written:
    """A file or a folder of ours. nbytes: of all files in it."""

    path: Path
    what: str
    nbytes: int


# Names in the two folders. Only these are ever deleted: SWARM_HOME may be a folder with other things in it.
_DATA = {"models": "models", "kernels": "compiled kernels"}
_STATE = {
    "calibration": "measurements of this machine",
    "chat_history": "what was typed into swarm-chat",
    "contributions": "what nodes here gave",
    "local.json": "the address of a local swarm",
    "nodes": "sockets of running nodes",
    "peers": "what was seen of peers",
    "records": "nodes that were seen last",
    "service.identity": "the service's identity",
    "service.identity.proof": "its proof of work",
}


def written(manager_files: Iterable[Path]) -> list[Written]:
    """All of it that exists. `manager_files`: of the service manager. What a hub's library keeps is not among it:
    other programs share that."""
    named = dict.fromkeys(manager_files, "of the service")
    for folder, names in ((data_dir(), _DATA), (state_dir(), _STATE)):
        named |= {folder / name: what for name, what in names.items()}
    return [Written(path, what, _size(path)) for path, what in named.items() if path.exists()]


def delete(found: Iterable[Written]) -> None:
    """Raises ResourceError."""
    for entry in found:
        try:
            if entry.path.is_dir() and not entry.path.is_symlink():
                shutil.rmtree(entry.path)
            else:
                entry.path.unlink(missing_ok=True)
        except OSError as error:
            raise ResourceError(f"cannot delete {error.filename}: {error.strerror}") from None
    for folder in (state_dir(), data_dir()):
        with contextlib.suppress(OSError):  # not empty, or not there
            folder.rmdir()


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # gone meanwhile
                continue
    return total
