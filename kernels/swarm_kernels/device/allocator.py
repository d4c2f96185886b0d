"""The C library's allocator: memory that was freed and is still this process's. Needs no torch."""

from __future__ import annotations

import ctypes
import sys


def release_free_memory() -> None:
    """Return freed memory to the system (`malloc_trim`); glibc keeps what each thread freed in its arena.

    Reading and packing a model leaves hundreds of megabytes there. Does nothing where the C library has no such call
    (musl, macOS, Windows).
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
