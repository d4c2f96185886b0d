"""Stamps: that a file had the right hash once, so that gigabytes need not be hashed at every start.

Owns their format. A file of another size or time than its stamp's is hashed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from pathlib import Path


def sha256_of(path: Path) -> str:
    """In hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp_matches(stamp: Path, target: Path, content_hash: str) -> bool:
    """Whether `target` is the file that had `content_hash` when `stamp` was written."""
    try:
        return bool(json.loads(stamp.read_bytes()) == _facts(target, content_hash))
    except (OSError, ValueError, RecursionError):
        return False


def write_stamp(stamp: Path, target: Path, content_hash: str) -> None:
    """After `target` was found to have `content_hash`. Raises OSError."""
    part = stamp.with_name(f"{stamp.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        part.write_text(json.dumps(_facts(target, content_hash)), encoding="utf-8")
        os.replace(part, stamp)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def _facts(target: Path, content_hash: str) -> dict[str, object]:
    status = target.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": content_hash}
