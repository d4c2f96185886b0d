"""Opening a drafter for a tail: what `swarm-node join --drafter` names, and what the node's record says of it.

Owns the fingerprint by which clients and tails know that they mean the same drafter. Knows no sessions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import DrafterFailed, ModelNotFound
from swarm.types import FINGERPRINT_BYTES, OfferedDrafter
from swarm_kernels.draft.dflash import open_dflash
from swarm_kernels.draft.eagle import open_eagle
from swarm_kernels.draft.folder import DFLASH, drafter_kind, fetched_folder
from swarm_kernels.draft.mtp import open_mtp
from swarm_kernels.draft.mtp_source import find_mtp, tensors_of
from swarm_kernels.draft.tapped import TappedDraft
from swarm_kernels.draft.tree import TreeBounds, measure_tree_ms
from swarm_kernels.models.source import ModelSource

MTP = "mtp"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class OpenDrafter:
    """`draft`, loaded; `offered`: what is said of it."""

    draft: TappedDraft
    offered: OfferedDrafter


def open_tail_drafter(spec: str, target: ModelSource, shape: TreeBounds = TreeBounds()) -> OpenDrafter:
    """`spec`: MTP for the checkpoint's own layer, the folder of an EAGLE-3 or DFlash drafter, or its name on a hub.

    Raises ModelNotFound, CorruptModel, DrafterFailed, UnsupportedModel, OutOfMemory, and as `ModelSource.fetch`.
    """
    if spec == MTP:
        draft: TappedDraft = open_mtp(target)
        name, fingerprint = target.name, _digest(f"{MTP} {target.weight_hash}".encode())
    else:
        folder = _folder(spec)
        draft = open_dflash(folder, target) if drafter_kind(folder) == DFLASH else open_eagle(folder, target)
        name, fingerprint = Path(spec).name, folder_fingerprint(folder)
    ms = measure_tree_ms(draft, shape)
    return OpenDrafter(draft, OfferedDrafter(draft.kind, name[:64], fingerprint, draft.taps.layers, ms))


def tail_drafter_bytes(spec: str, target: ModelSource) -> int:
    """What its weights take, about, before they are read. Raises ModelNotFound and DrafterFailed for what is none, and
    CorruptModel."""
    if spec == MTP:
        if (layout := find_mtp(target)) is None:
            raise DrafterFailed(f"{target.name} has no MTP layers; choose another drafter")
        return sum(target.nbytes(name) for name in tensors_of(target, layout))
    folder = _folder(spec)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _folder(spec: str) -> Path:
    """Raises ModelNotFound."""
    folder = Path(spec) if drafter_kind(Path(spec)) is not None else fetched_folder(spec)
    if folder is None:
        raise ModelNotFound(f"there is no EAGLE-3 or DFlash drafter at {spec}; name its folder, or mtp")
    return folder


def folder_fingerprint(folder: Path) -> bytes:
    """Of a drafter's config and weights, wherever they lie. Raises DrafterFailed."""
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"swarm drafter 1")
    try:
        for file in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
            digest.update(file.stat().st_size.to_bytes(8, "big"))
            with file.open("rb") as opened:
                while chunk := opened.read(_CHUNK):
                    digest.update(chunk)
    except OSError as error:
        raise DrafterFailed(f"the drafter in {folder} cannot be read: {error.strerror}") from None
    return digest.digest()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=FINGERPRINT_BYTES, person=b"swarm drafter 1").digest()
