"""Private folders for a host's unix sockets, removed once their owner has ended, also if it was killed.

Owns how an owner that was killed is distinguished from one that runs: each holds a file lock, which ends with its
process. Knows nothing of what is kept in the folders.
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
    """A new folder, at `path`. The folders of owners that were killed are removed first."""

    def __init__(self) -> None:
        """Raises NetworkError."""
        parent = tempfile.gettempdir() if len(os.fsencode(tempfile.gettempdir())) <= MAX_PATH else "/tmp"
        remove_stale(Path(parent))
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # 0700
            self._lock = FileLock(self.path / f"{_OWNER}.new", thread_local=False)
            self._lock.acquire()
            (self.path / f"{_OWNER}.new").rename(self.path / _OWNER)  # never visible unlocked while we run
        except OSError as error:
            raise NetworkError(f"no folder for the p2p daemon's sockets: {error.strerror}; free some space") from None

    def remove(self) -> None:
        """Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def remove_stale(parent: Path) -> None:
    """Remove the folders of this user in `parent` whose owner has ended."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            info = folder.lstat()  # another user's may be a trap: a link, or with a link in it
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) != 0o700:
                continue
            if not (folder / _OWNER).exists():
                continue
            with FileLock(folder / _OWNER, timeout=0):
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, Timeout):
            continue  # its owner runs, or another process has just removed it
