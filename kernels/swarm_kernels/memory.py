"""Memory that the process no longer uses, given back to the system.

Owns that one call of the C library. glibc keeps what threads freed in an arena for each of them: a model that was read,
packed and let go of leaves hundreds of megabytes there.
"""

from __future__ import annotations

import ctypes
import sys


def release_free_memory() -> None:
    """Does nothing where the C library has no such call (musl, macOS, Windows)."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
