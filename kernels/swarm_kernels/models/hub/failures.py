"""The sentences for everything that can go wrong between this machine and a hub.

Owns the mapping of exceptions, of huggingface_hub and of the system, to errors of ours.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from swarm.errors import DiskFull, ModelNotFound, SwarmError

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
PASSING_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Of HTTP: another attempt may succeed."""


@contextlib.contextmanager
def told(repo: str, folder: Path) -> Iterator[None]:
    """Turns failures of the hub and of the disk into one sentence. `folder`: where files are kept.

    Raises ModelNotFound, DiskFull; SwarmErrors pass.
    """
    from huggingface_hub import errors

    failures: tuple[type[Exception], ...] = (OSError, ValueError, *transport_errors())
    try:
        yield
    except SwarmError:
        raise
    except errors.GatedRepoError:
        raise ModelNotFound(
            f"the model {repo} is gated; accept its licence on huggingface.co and run 'hf auth login'"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelNotFound(f"{repo} has no such revision; check what follows the @") from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFound(f"Hugging Face has no model {repo}, or it is private; check its name") from None
    except failures as error:
        raise _of(error, repo, folder) from None


def _of(error: Exception, repo: str, folder: Path) -> SwarmError:
    status = status_of(error)
    if status == 401:
        return ModelNotFound(f"the hub wants to know who asks for {repo}; run 'hf auth login', or check its token")
    if status == 403:
        return ModelNotFound(f"the hub does not let you read {repo}; ask its owner, or run 'hf auth login'")
    if status == 404:
        return ModelNotFound(f"a file of {repo} is no longer on the hub; run again to see what is there now")
    if isinstance(error, OSError) and status is None and error.errno is not None:
        if error.errno in _DISK_FULL:
            return DiskFull(f"the disk of {folder} is full; free some room and run again, what has come is kept")
        if error.filename is not None:
            return ModelNotFound(f"cannot keep {repo} in {folder} ({error.strerror}); set HF_HOME to another folder")
    reason = f"HTTP {status}" if status else type(error).__name__
    return ModelNotFound(
        f"the model {repo} is neither in the local cache nor can it be fetched from huggingface.co ({reason}); "
        "check the network and run again, what has come is kept; or give a folder or a .gguf file"
    )


def status_of(error: Exception) -> int | None:
    """Of HTTP, if the hub answered with one."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


def transport_errors() -> tuple[type[Exception], ...]:
    """What a request raises that got no answer, or a bad one."""
    from huggingface_hub import errors

    return (errors.HTTPError, ConnectionError, TimeoutError)  # type: ignore[attr-defined]


def is_passing(error: Exception, offline: bool = False) -> bool:
    """Whether another attempt may succeed: the connection failed, or the hub is busy.

    `offline`: what to say where the user has forbidden all requests (HF_HUB_OFFLINE).
    """
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return offline
    status = status_of(error)
    return status is None or status in PASSING_STATUSES
