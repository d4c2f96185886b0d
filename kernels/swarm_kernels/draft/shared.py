"""Drafters that are loaded once for all clients of a process. Owns when a loaded one is still what its files hold.

A folder's modification time does not change when a file in it is overwritten, so a drafter is known by the times and
sizes of the files themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from swarm.errors import ModelNotFound

MAX_FILES = 256  # of a folder that are looked at

_T = TypeVar("_T")
_Stamp = tuple[tuple[str, int, int], ...]


class SharedDrafts(Generic[_T]):
    """Of one kind. A drafter is kept while somebody holds it; two threads never load one twice."""

    def __init__(self) -> None:
        self._loaded: WeakValueDictionary[tuple[Path, _Stamp, str], _T] = WeakValueDictionary()
        self._lock = threading.Lock()

    def open(self, path: Path, weight_hash: str, load: Callable[[], _T], missing: str) -> _T:
        """The drafter in the file or folder `path` for the target with this fingerprint. Raises as `load`, and
        ModelNotFound, which says `missing`."""
        try:
            key = path.resolve(), _stamp(path), weight_hash
        except OSError:
            raise ModelNotFound(missing) from None
        with self._lock:
            draft = self._loaded.get(key)
            if draft is None:
                draft = self._loaded[key] = load()
            return draft


def _stamp(path: Path) -> _Stamp:
    """Name, modification time in ns and size of each file. Raises OSError."""
    files = sorted(islice(path.iterdir(), MAX_FILES)) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)
