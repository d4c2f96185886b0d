"""One repository at one commit: which of its files are here, and fetching the others.

Owns the order of fetching: room on the disk first, several files at a time, one process at a file, hashes checked once.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from filelock import Timeout

from swarm.errors import CorruptModel, DiskFull, ModelNotFound
from swarm_kernels.models.hub.cache import RepoCache
from swarm_kernels.models.hub.failures import is_passing, told, transport_errors
from swarm_kernels.models.hub.listing import COMMIT, REVISION, Listing, RemoteFile, ask_hub
from swarm_kernels.models.hub.policy import POLICY
from swarm_kernels.models.hub.transfer import content_hash, download, read_range

FetchProgress = Callable[[int, int], None]
"""Called with the bytes that are here and those that are needed, of one `fetch`; from several threads, one at a time.
An exception that it raises ends the fetching; what has come is kept."""

A = TypeVar("A")
B = TypeVar("B")
_REPORT_S = 0.1
_LOCK_POLL_S = 0.2


class FetchStopped(Exception):
    """Another file of the same fetch failed."""


class HubRepo:
    """Files of `listing`, kept in `cache`."""

    def __init__(self, listing: Listing, cache: RepoCache, offline: bool = False) -> None:
        """`offline`: never ask the hub for anything."""
        self.listing = listing
        self.cache = cache
        self.offline = offline
        self.fetched_bytes = 0  # over the network, since this object was made

    @classmethod
    def open(cls, repo: str, revision: str | None = None, cache_dir: Path | None = None) -> HubRepo:
        """Ask the hub for the listing; one that was kept serves where the hub cannot be reached.

        `revision`: a branch, tag or commit; None: the main branch. Raises ModelNotFound, CorruptModel.
        """
        if revision is not None and (not REVISION.fullmatch(revision) or ".." in revision):
            raise ModelNotFound(f"{revision[:100]!r} is no revision of {repo}; give a branch, a tag or a commit")
        cache = RepoCache.of(repo, cache_dir)
        kept = cache.kept_listing(revision)
        if kept is not None and revision is not None and COMMIT.fullmatch(revision):
            return cls(kept, cache)  # a commit never changes
        with told(repo, cache.folder):
            try:
                listing = ask_hub(repo, revision)
            except transport_errors() as error:
                kept = kept or cache.listing_of_snapshot(revision)
                if kept is None or not is_passing(error, offline=True):
                    raise
                return cls(kept, cache)
            cache.keep_listing(revision or "main", listing)
        return cls(listing, cache)

    @classmethod
    def cached(cls, cache: RepoCache, revision: str | None = None) -> HubRepo | None:
        """What is known of a repository without asking the hub."""
        listing = cache.kept_listing(revision) or cache.listing_of_snapshot(revision)
        return cls(listing, cache, offline=True) if listing is not None else None

    @property
    def folder(self) -> Path:
        """The snapshot: where the files lie that are here."""
        return self.cache.snapshot(self.listing.commit)

    def is_here(self, name: str) -> bool:
        return self.cache.holds(self.listing.commit, self.listing.find(name))

    def missing_bytes(self, names: Iterable[str]) -> int:
        """Of the files `names`: what `fetch` would transfer."""
        files = [self.listing.find(name) for name in set(names)]
        return sum(f.size - self.cache.received(f) for f in files if not self.cache.holds(self.listing.commit, f))

    def fetch(self, names: Iterable[str], progress: FetchProgress | None = None) -> None:
        """Have the files `names` here, whole and verified. Does nothing for those that are.

        Raises ModelNotFound, CorruptModel (a wrong hash; the file is deleted), DiskFull.
        """
        commit = self.listing.commit
        files = [self.listing.find(name) for name in sorted(set(names))]
        files = [file for file in files if not self.cache.is_verified(commit, file)]
        if not files:
            return
        self._check_online()
        meter = _Meter(sum(file.size for file in files), progress)
        with told(self.listing.repo, self.cache.folder):
            self.cache.prepare(commit)
            self._check_room(files)
            _all_of(lambda file: self._have(file, meter), files, POLICY.parallel_files, meter.stop)
        meter.finish()

    def read_many(self, pieces: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """(file, offset, length) -> bytes of remote files; nothing is kept. Raises ModelNotFound, CorruptModel."""

        def read(piece: tuple[str, int, int]) -> bytes:
            name, offset, length = piece
            data = read_range(self.listing, self.listing.find(name), offset, length)
            with meter.lock:
                self.fetched_bytes += len(data)
            return data

        if not pieces:
            return []
        self._check_online()
        meter = _Meter(0, None)
        with told(self.listing.repo, self.cache.folder):
            return _all_of(read, pieces, POLICY.parallel_ranges, meter.stop)

    def _check_online(self) -> None:
        if self.offline:
            raise ModelNotFound(f"not all of {self.listing.repo} that is needed is in {self.cache.folder}")

    def _check_room(self, files: Sequence[RemoteFile]) -> None:
        need = self.missing_bytes(file.name for file in files)
        free = shutil.disk_usage(self.cache.folder).free
        if need and need + POLICY.free_bytes > free:
            raise DiskFull(
                f"{self.listing.repo} needs {_size(need)} more, {_size(free)} are free in {self.cache.root}; "
                "free some room ('swarm-node models' lists what is there), or set HF_HOME to another disk"
            )

    def _have(self, file: RemoteFile, meter: _Meter) -> None:
        commit, cache = self.listing.commit, self.cache
        lock = cache.lock(file)
        while True:
            try:
                lock.acquire(timeout=_LOCK_POLL_S)
                break
            except Timeout:  # another process fetches it
                meter.add(0)
        try:
            if not cache.holds(commit, file) and _size_of(cache.blob(file)) == file.size:
                cache.link(commit, file)  # of another revision
            if cache.holds(commit, file):
                self._verify(file, meter)
            else:
                self._transfer(file, meter)
            cache.set_verified(commit, file)
        finally:
            lock.release()

    def _verify(self, file: RemoteFile, meter: _Meter) -> None:
        """Hash a file that another program or an earlier version fetched."""
        commit = self.listing.commit
        verified = self.cache.is_verified(commit, file)  # by another process, while this one waited
        if not verified and content_hash(self.folder / file.name, file) != file.content_hash:
            self.cache.discard(commit, file)
            self.cache.forget_pieces(commit)  # some may be of this file
            raise CorruptModel(
                f"{file.name} of {self.listing.repo} does not have the hash that the hub states; "
                "it was deleted, run again to fetch it anew"
            )
        meter.add(file.size)

    def _transfer(self, file: RemoteFile, meter: _Meter) -> None:
        calls = 0

        def received(count: int) -> None:
            nonlocal calls
            calls += 1
            with meter.lock:
                self.fetched_bytes += max(0, count) if calls > 1 else 0  # the first: what an earlier attempt left
            meter.add(count)

        download(self.listing, file, self.cache.part(file), received)
        self.cache.adopt(self.listing.commit, file)


class _Meter:
    """Bytes that are here of one fetch, and the word that it has to stop."""

    def __init__(self, total: int, progress: FetchProgress | None) -> None:
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self._total, self._done, self._progress = total, 0, progress
        self._reported_at = -_REPORT_S

    def add(self, count: int) -> None:
        """Raises FetchStopped, and what `progress` raises."""
        if self.stop.is_set():
            raise FetchStopped
        with self.lock:
            self._done += count
            now = time.monotonic()
            if self._progress is not None and now - self._reported_at >= _REPORT_S:
                self._reported_at = now
                self._progress(self._done, self._total)

    def finish(self) -> None:
        if self._progress is not None:
            self._progress(self._total, self._total)


def _all_of(work: Callable[[A], B], items: Sequence[A], threads: int, stop: threading.Event) -> list[B]:
    """`work` of each item, some at a time. The first failure ends all and is raised; so does Ctrl-C."""
    with ThreadPoolExecutor(threads, thread_name_prefix="hub") as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
    failed = [future.exception() for future in futures if future.done() and not future.cancelled()]
    for error in sorted(filter(None, failed), key=lambda error: isinstance(error, FetchStopped)):
        raise error
    return [future.result() for future in futures]


def _size_of(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
