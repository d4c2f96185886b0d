"""Folders for a host's unix sockets, which nobody else may use, and which go once their owner has, however it ended.

Owns how an owner that was killed is told from one that lives: each holds a lock, which ends with its process. Knows
nothing of what is kept in them.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from swarm.errors import NetworkError

MAX_PATH = 80  # bytes of folder, so that the names of unix sockets in it stay under their 108
_PREFIX = "swarm-"
_OWNER = "owner"


class SocketDir:
    """A new one, at `path`. Those of owners that were killed are removed as it is made."""

    def __init__(self) -> None:
        """Raises NetworkError."""
        place = tempfile.gettempdir() if len(os.fsencode(tempfile.gettempdir())) <= MAX_PATH else "/tmp"
        remove_stale(Path(place))
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))  # 0700
            self._lock = FileLock(self.path / f"{_OWNER}.new", thread_local=False)
            self._lock.acquire()
            (self.path / f"{_OWNER}.new").rename(self.path / _OWNER)  # it is never there unlocked while we live
        except OSError as error:
            raise NetworkError(f"no folder for the p2p daemon's sockets: {error.strerror}; free some space") from None

    def remove(self) -> None:
        """Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def remove_stale(place: Path) -> None:
    """Remove the folders in `place` that were ours and whose owner is gone."""
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            seen = folder.lstat()  # a stranger's may be a trap: a link, or with a link in it
            if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid() or stat.S_IMODE(seen.st_mode) != 0o700:
                continue
            if not (folder / _OWNER).exists():
                continue
            with FileLock(folder / _OWNER, timeout=0):
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, Timeout):
            continue  # its owner lives, or somebody else has just removed it
