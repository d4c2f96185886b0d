"""What a repository holds at one commit: its files, their sizes and hashes, as the hub states them.

Owns which of the hub's statements are believed: names without folders, sizes within bounds, hashes that are hashes.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from swarm.errors import CorruptModel, ModelNotFound
from swarm_kernels.models.hub.policy import POLICY

REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,199}", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[A-Za-z0-9_][\w.+-]{0,199}", re.ASCII)  # no folder, and no hidden file

Sha = Annotated[str, Meta(pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})$")]


class RemoteFile(msgspec.Struct, frozen=True):
    """`content_hash`: 64 digits are the SHA-256 of the content, 40 are git's SHA-1 of it as a blob."""

    name: str
    size: Annotated[int, Meta(ge=0, le=POLICY.max_file_bytes)]
    content_hash: Sha


class Listing(msgspec.Struct, frozen=True):
    repo: str
    commit: Annotated[str, Meta(pattern=r"^[0-9a-f]{40}$")]
    files: dict[str, RemoteFile]

    def find(self, name: str) -> RemoteFile:
        try:
            return self.files[name]
        except KeyError:
            raise ModelNotFound(f"{self.repo} has no file {name[:100]!r} on the hub") from None

    def with_suffix(self, suffix: str) -> list[str]:
        return sorted(name for name in self.files if name.endswith(suffix))


def is_plain_name(name: str) -> bool:
    """Whether a name can be that of a file right in a folder, and nowhere else."""
    return bool(_NAME.fullmatch(name)) and ".." not in name


def ask_hub(repo: str, revision: str | None) -> Listing:
    """The listing as the hub has it now: one request. Raises what `failures.told` makes sentences of, CorruptModel."""
    from huggingface_hub import HfApi, constants  # half a second, and most programs open a local file

    api = HfApi(endpoint=constants.ENDPOINT, library_name="swarm")
    info = api.model_info(repo, revision=revision, files_metadata=True, timeout=POLICY.timeout_s)
    siblings = info.siblings or []
    if not COMMIT.fullmatch(info.sha or ""):
        raise CorruptModel(f"the hub names no commit of {repo}; try again, or set HF_ENDPOINT to another hub")
    if len(siblings) > POLICY.max_files:
        raise CorruptModel(f"{repo} has {len(siblings)} files, more than {POLICY.max_files}; it cannot be a model")
    files = {}
    for sibling in siblings:
        file = _believed(sibling)
        if file is not None:
            files[file.name] = file
    return Listing(repo, str(info.sha), files)


def _believed(sibling: Any) -> RemoteFile | None:
    """None for what is not needed of a model, or is stated without size and hash."""
    name = sibling.rfilename
    if not isinstance(name, str) or not is_plain_name(name):
        return None
    lfs = sibling.lfs
    stated = {
        "name": name,
        "size": lfs.size if lfs else sibling.size,
        "content_hash": str((lfs.sha256 if lfs else sibling.blob_id) or "").lower(),
    }
    try:
        return msgspec.convert(stated, RemoteFile)
    except msgspec.ValidationError:
        return None
