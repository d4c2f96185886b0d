"""Where the files of one repository lie on this disk: Hugging Face's own cache folder, so that other programs share it.

Owns the layout: `models--org--name` with `refs`, `blobs` and `snapshots` as huggingface_hub writes them, and our own
`swarm` beside these, with listings, stamps and pieces of files that were not fetched whole.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from filelock import FileLock

from swarm.errors import UNDECODABLE, ModelNotFound
from swarm_kernels.models.hub.listing import COMMIT, REPO, REVISION, Listing, RemoteFile, is_plain_name
from swarm_kernels.models.hub.policy import POLICY
from swarm_kernels.models.hub.stamps import stamp_matches, write_stamp

T = TypeVar("T")
_FOLDER = re.compile(r"models--([\w.-]+?)--([\w.-]+)", re.ASCII)
_MAX_REPOS = 4096


class Pieces(msgspec.Struct):
    """Parts of files that were read by range: `heads` by file, `starts` by tensor."""

    heads: dict[str, bytes] = {}
    starts: dict[str, bytes] = {}


@dataclass(frozen=True, slots=True)
class RepoCache:
    """The folder of one repository. `root` holds those of all."""

    root: Path
    repo: str

    @classmethod
    def of(cls, repo: str, cache_dir: Path | None = None) -> RepoCache:
        """`cache_dir`: by default Hugging Face's. Raises ModelNotFound for what is no name of a repository."""
        if not REPO.fullmatch(repo) or ".." in repo:
            raise ModelNotFound(f"{repo[:200]!r} is no name of a model on a hub, such as org/name")
        return cls(cache_dir or default_root(), repo)

    @property
    def folder(self) -> Path:
        return self.root / ("models--" + self.repo.replace("/", "--"))

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def blob(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / file.content_hash

    def part(self, file: RemoteFile) -> Path:
        """What has come of a file that is not whole yet."""
        return self.folder / "blobs" / f"{file.content_hash}.swarm.incomplete"

    def stamp(self, file: RemoteFile) -> Path:
        return self.folder / "swarm" / f"{file.content_hash}.stamp"

    def prepare(self, commit: str) -> None:
        """Make the folders. Raises OSError."""
        for folder in (self.snapshot(commit), self.folder / "blobs", self.folder / "swarm", self.folder / "refs"):
            folder.mkdir(parents=True, exist_ok=True)

    def lock(self, file: RemoteFile) -> FileLock:
        """The one that huggingface_hub takes while it fetches the same file. Raises OSError."""
        folder = self.root / ".locks" / self.folder.name
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / f"{file.content_hash}.lock")

    def holds(self, commit: str, file: RemoteFile) -> bool:
        """Whether a whole file is there; its hash is not looked at."""
        try:
            return (self.snapshot(commit) / file.name).stat().st_size == file.size
        except OSError:
            return False

    def is_verified(self, commit: str, file: RemoteFile) -> bool:
        return stamp_matches(self.stamp(file), self.snapshot(commit) / file.name, file.content_hash)

    def set_verified(self, commit: str, file: RemoteFile) -> None:
        write_stamp(self.stamp(file), self.snapshot(commit) / file.name, file.content_hash)

    def received(self, file: RemoteFile) -> int:
        """Bytes of a file that an earlier attempt left."""
        try:
            return min(self.part(file).stat().st_size, file.size)
        except OSError:
            return 0

    def adopt(self, commit: str, file: RemoteFile) -> None:
        """Give a whole part its place. Raises OSError."""
        os.replace(self.part(file), self.blob(file))
        self.link(commit, file)

    def link(self, commit: str, file: RemoteFile) -> None:
        """The name of a blob in a snapshot: a link, or the file itself where there are no links. Raises OSError."""
        pointer = self.snapshot(commit) / file.name
        with contextlib.suppress(FileNotFoundError):
            pointer.unlink()
        try:
            pointer.symlink_to(os.path.relpath(self.blob(file), pointer.parent))
        except OSError:
            os.replace(self.blob(file), pointer)

    def discard(self, commit: str, file: RemoteFile) -> None:
        """Delete a file, its part and its stamp."""
        for path in (self.snapshot(commit) / file.name, self.blob(file), self.part(file), self.stamp(file)):
            with contextlib.suppress(OSError):
                path.unlink()

    def keep_listing(self, revision: str | None, listing: Listing) -> None:
        """Raises OSError."""
        self.prepare(listing.commit)
        _write(self.folder / "swarm" / f"{listing.commit}.listing", msgspec.msgpack.encode(listing))
        if revision is not None and not COMMIT.fullmatch(revision):
            reference = self.folder / "refs" / revision
            reference.parent.mkdir(parents=True, exist_ok=True)
            _write(reference, listing.commit.encode())

    def kept_listing(self, revision: str | None) -> Listing | None:
        """The listing that was kept for a branch, tag or commit; None for `revision`: of `main`."""
        commit = self.commit_of(revision or "main")
        kept = commit and _read(self.folder / "swarm" / f"{commit}.listing", Listing)
        if not kept or kept.repo != self.repo or kept.commit != commit:
            return None
        return kept if all(name == file.name and is_plain_name(name) for name, file in kept.files.items()) else None

    def listing_of_snapshot(self, revision: str | None) -> Listing | None:
        """What another program fetched: its links name the blobs, and these are named by their hashes."""
        commit = self.commit_of(revision or "main")
        files: dict[str, RemoteFile] = {}
        try:
            for pointer in self.snapshot(commit).iterdir() if commit else ():
                if is_plain_name(pointer.name) and pointer.is_symlink() and pointer.is_file():
                    stated = {"name": pointer.name, "size": pointer.stat().st_size}
                    blob = os.path.basename(os.readlink(pointer))
                    files[pointer.name] = msgspec.convert({**stated, "content_hash": blob}, RemoteFile)
        except (OSError, msgspec.ValidationError):
            return None
        return Listing(self.repo, commit, files) if commit and files else None

    def commit_of(self, revision: str) -> str | None:
        """The commit that a branch, tag or commit was when it was last looked up."""
        if COMMIT.fullmatch(revision):
            return revision
        if not REVISION.fullmatch(revision) or ".." in revision:
            return None
        try:
            with (self.folder / "refs" / revision).open("rb") as file:
                commit = file.read(100).decode("ascii", "replace").strip()
        except (OSError, ValueError):
            return None
        return commit if COMMIT.fullmatch(commit) else None

    def keep_pieces(self, commit: str, pieces: Pieces) -> None:
        """Raises OSError."""
        _write(self.folder / "swarm" / f"{commit}.pieces", msgspec.msgpack.encode(pieces))

    def kept_pieces(self, commit: str) -> Pieces:
        return _read(self.folder / "swarm" / f"{commit}.pieces", Pieces) or Pieces()

    def forget_pieces(self, commit: str) -> None:
        with contextlib.suppress(OSError):
            (self.folder / "swarm" / f"{commit}.pieces").unlink()

    def size(self) -> int:
        """Bytes on the disk, of files inside this folder only: links are not followed."""
        return sum(size for _, size in _files(self.folder))

    def remove(self) -> int:
        """Delete the folder. -> bytes freed. Raises ModelNotFound, OSError."""
        try:
            is_folder = stat.S_ISDIR(self.folder.lstat().st_mode)
        except OSError:
            raise ModelNotFound(f"{self.repo} is not in the cache {self.root}") from None
        if not is_folder:
            raise ModelNotFound(f"{self.folder} is a link or a file; delete it yourself")
        freed = self.size()
        shutil.rmtree(self.folder)  # follows no links
        shutil.rmtree(self.root / ".locks" / self.folder.name, ignore_errors=True)
        return freed


def default_root() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_repos(cache_dir: Path | None = None) -> list[RepoCache]:
    """The repositories of models that have a folder in the cache, by name; anything else there is left out."""
    root = cache_dir or default_root()
    found = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                match = _FOLDER.fullmatch(entry.name)
                repo = f"{match[1]}/{match[2]}" if match else ""
                if match and entry.is_dir(follow_symlinks=False) and REPO.fullmatch(repo) and ".." not in repo:
                    found.append(RepoCache(root, repo))
    except OSError:
        return []
    return sorted(found, key=lambda cache: cache.repo)[:_MAX_REPOS]


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                if stat.S_ISREG(status.st_mode):
                    yield name, status.st_size


def _read(path: Path, kind: type[T]) -> T | None:
    """What was kept in a file; None if it is not there, or is not ours."""
    try:
        with path.open("rb") as file:
            data = file.read(POLICY.max_kept_bytes + 1)
        return msgspec.msgpack.decode(data, type=kind) if len(data) <= POLICY.max_kept_bytes else None
    except (OSError, *UNDECODABLE):
        return None


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
