"""Private folders for a host's unix sockets, removed once their owner has ended, also if it was killed.

Owns how an owner that was killed is distinguished from one that runs: each holds a file lock, which ends with its
process. Knows nothing of what is kept in the folders.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from filelock import FileLock, Timeout

from swarm.errors import NetworkError

MAX_PATH = 80  # bytes of folder, so that the names of unix sockets in it stay under their 108
_PREFIX = "swarm-"
_OWNER = "owner"
_UNFINISHED_S = 600.0  # a folder without an owner is that of one killed while it made it, which takes milliseconds


class SocketDir:
    """A new folder, at `path`. The folders of owners that were killed are removed first.

    `with SocketDir() as path:` removes it at the end.
    """

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
            raise NetworkError(f"no folder for sockets can be made: {error.strerror}; free some space") from None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.remove()

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
            if (folder / _OWNER).exists():
                with FileLock(folder / _OWNER, timeout=0):
                    shutil.rmtree(folder, ignore_errors=True)
            elif _was_left_unfinished(folder, info.st_mtime):
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, Timeout):
            continue  # its owner runs, or another process has just removed it


def _was_left_unfinished(folder: Path, changed_at: float) -> bool:
    """Whether this is our folder, and its owner was killed before it locked it: nothing but its lock is in it."""
    names = {entry.name for entry in folder.iterdir()}
    return names == {f"{_OWNER}.new"} and time.time() - changed_at > _UNFINISHED_S
