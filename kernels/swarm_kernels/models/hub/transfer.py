"""Bytes of one remote file: a range of them, or all, appended to what an earlier attempt left.

Owns HTTP ranges, attempts and the hash of what came. Where files are kept is in `cache`. Redirects, proxies and tokens
are huggingface_hub's.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from swarm.errors import CorruptModel
from swarm_kernels.models.hub.failures import is_passing, transport_errors
from swarm_kernels.models.hub.listing import Listing, RemoteFile
from swarm_kernels.models.hub.policy import POLICY

Received = Callable[[int], None]
"""Called with the number of bytes that came; a negative one for what must be fetched again. May raise to stop."""

_CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/")


class Attempts:
    """Counts attempts that brought nothing, and waits between them."""

    def __init__(self) -> None:
        self._failed = 0

    def after(self, error: Exception, progressed: bool) -> None:
        """Wait for the next attempt, or raise `error`."""
        self._failed = 0 if progressed else self._failed + 1
        if self._failed > POLICY.retries or not is_passing(error):
            raise error
        time.sleep(min(POLICY.retry_wait_s * 2 ** max(self._failed - 1, 0), POLICY.max_retry_wait_s))


def read_range(listing: Listing, file: RemoteFile, offset: int, length: int) -> bytes:
    """`length` bytes from `offset`. Raises CorruptModel, and the errors of huggingface_hub and httpx."""
    if offset < 0 or length < 0 or offset + length > file.size:
        raise CorruptModel(f"{file.name} of {listing.repo} has {file.size} bytes, {offset + length} are needed")
    if not length:
        return b""
    attempts = Attempts()
    while True:
        try:
            with _stream(listing, file, offset, offset + length) as response:
                return _exactly(response, length, listing, file)
        except transport_errors() as error:
            attempts.after(error, False)


def download(listing: Listing, file: RemoteFile, part: Path, received: Received) -> None:
    """Append to `part` until it is the whole file, and check its hash. What came stays there, however this ends.

    Raises CorruptModel for another size or hash (then `part` is gone), OSError, and the errors of httpx.
    """
    with part.open("ab+") as target:
        digest, done = _resumed(target, file)
        received(done)
        attempts = Attempts()
        while done < file.size:
            before = done
            try:
                with _stream(listing, file, done, file.size) as response:
                    if done and response.status_code == 200:  # the server knows no ranges: all of it again
                        target.truncate(0)
                        received(-done)
                        digest, done, before = _new_digest(file), 0, 0
                    for chunk in response.iter_bytes(POLICY.chunk_bytes):
                        done += len(chunk)
                        if done > file.size:
                            raise _wrong(part, listing, file, "is longer than the hub states")
                        target.write(chunk)
                        digest.update(chunk)
                        received(len(chunk))
                if done < file.size:
                    raise ConnectionResetError("the connection ended early")
            except transport_errors() as error:
                target.flush()
                attempts.after(error, done > before)
    if digest.hexdigest() != file.content_hash:
        raise _wrong(part, listing, file, "does not have the hash that the hub states")


def content_hash(path: Path, file: RemoteFile) -> str:
    """The hash of a local file, of the kind that the hub states for `file`. Raises OSError."""
    digest = _new_digest(file)
    with path.open("rb") as source:
        while chunk := source.read(POLICY.chunk_bytes):
            digest.update(chunk)
    return str(digest.hexdigest())


def _resumed(target: BinaryIO, file: RemoteFile) -> tuple[Any, int]:
    """The hash and length of what an earlier attempt left."""
    target.seek(0)
    digest, done = _new_digest(file), 0
    while chunk := target.read(POLICY.chunk_bytes):
        digest.update(chunk)
        done += len(chunk)
        if done > file.size:  # no part of this file
            target.truncate(0)
            return _new_digest(file), 0
    return digest, done


def _new_digest(file: RemoteFile) -> Any:
    if len(file.content_hash) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)  # what git calls the file


def _wrong(part: Path, listing: Listing, file: RemoteFile, how: str) -> CorruptModel:
    with contextlib.suppress(OSError):
        part.unlink()
    return CorruptModel(f"{file.name} of {listing.repo} {how}; it was deleted, run again to fetch it anew")


@contextlib.contextmanager
def _stream(listing: Listing, file: RemoteFile, start: int, end: int) -> Iterator[Any]:
    """The response to a request for the bytes `[start, end)`."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

    url = hf_hub_url(listing.repo, file.name, revision=listing.commit, endpoint=constants.ENDPOINT)
    headers = {**build_hf_headers(library_name="swarm"), "Accept-Encoding": "identity"}
    if (start, end) != (0, file.size):
        headers["Range"] = f"bytes={start}-{end - 1}"
    session = get_session()
    with session.stream("GET", url, headers=headers, timeout=POLICY.timeout_s, follow_redirects=True) as response:
        hf_raise_for_status(response)
        if response.status_code == 206:
            found = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != start:
                raise CorruptModel(f"the hub answers with other bytes of {file.name} than were asked for; try again")
        yield response


def _exactly(response: Any, length: int, listing: Listing, file: RemoteFile) -> bytes:
    """The first `length` bytes of a response. A server that knows no ranges sends all; the rest is not read."""
    if response.status_code != 206 and "range" in response.request.headers:
        asked = int(response.request.headers["range"].removeprefix("bytes=").split("-")[0])
        if asked:
            raise CorruptModel(f"the hub of {listing.repo} cannot send parts of a file; set HF_ENDPOINT to another one")
    data = bytearray()
    for chunk in response.iter_bytes(min(length, POLICY.chunk_bytes)):
        data += chunk
        if len(data) >= length:
            return bytes(memoryview(data)[:length])
    raise ConnectionResetError("the connection ended early")
