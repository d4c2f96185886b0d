"""What `--drafter auto` finds on this machine: heads beside a model, layers within it, drafts that come with swarm.

Owns where is looked, and opening what was found. Which is taken is decided by `planner.speculation.drafter_choice`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from swarm.errors import ModelError
from swarm.planner.speculation.drafter_choice import DrafterKind, DrafterOffer
from swarm_client.speculation.drafters.base import Drafter
from swarm_client.speculation.drafters.bundled import find_bundled
from swarm_client.speculation.drafters.medusa import MedusaDrafter
from swarm_client.speculation.drafters.model import ModelDrafter
from swarm_client.speculation.drafters.stored import StoredDrafter
from swarm_client.speculation.drafters.tapped import TappedDrafter
from swarm_kernels.device.device import single_threaded
from swarm_kernels.draft.continuation_store import ContinuationStore
from swarm_kernels.draft.dflash import open_dflash
from swarm_kernels.draft.eagle import open_eagle
from swarm_kernels.draft.file import read_card
from swarm_kernels.draft.folder import DFLASH, drafter_kind
from swarm_kernels.draft.models import open_draft
from swarm_kernels.draft.mtp import open_mtp
from swarm_kernels.draft.mtp_source import find_mtp, tensors_of
from swarm_kernels.draft.tapped import TappedDraft
from swarm_kernels.draft.tapped_draft import open_tapped_draft
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch

MAX_ENTRIES = 1024  # of a folder that are looked at

MakeDrafter = Callable[[], Drafter]


@dataclass(slots=True)
class FoundDrafters:
    """`open`: loads an offer; raises ModelError, DrafterFailed. `damaged`: a sentence for each that cannot be one."""

    open: dict[DrafterOffer, Callable[[], MakeDrafter]] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)


def find_offers(target: ModelSource) -> FoundDrafters:
    """All that could draft for a model, the last node's heads always among them: whether it has some is seen then."""
    found = FoundDrafters({DrafterOffer(DrafterKind.MEDUSA): lambda: MedusaDrafter})
    for folder, kind in _folders(target.path):
        offered = DrafterKind.DFLASH if kind == DFLASH else DrafterKind.EAGLE
        found.open[DrafterOffer(offered, folder.name)] = partial(open_folder, folder, target)
    try:
        if (layout := find_mtp(target)) is not None:
            names = tensors_of(target, layout)
            size = sum(target.nbytes(name) for name in names) // 2  # in 8 bits; checkpoints have 16
            offer = DrafterOffer(DrafterKind.MTP, target.name, target.missing_bytes(names), size)
            found.open[offer] = partial(open_layer, target)
    except ModelError as error:
        found.damaged.append(f"its MTP layer: {error}")
    try:
        if (bundled := find_bundled(target)) is not None:
            found.open[DrafterOffer(DrafterKind.BUNDLED, bundled.stem)] = partial(open_trained, bundled, target)
    except ModelError as error:
        found.damaged.append(f"the trained draft: {error}")
    return found


def open_folder(folder: Path, target: ModelSource, name: str = "") -> MakeDrafter:
    """Of an EAGLE-3 or a DFlash drafter. `name`: what statistics call it, by default as its folder. Raises ModelError,
    DrafterFailed."""
    head: TappedDraft = open_dflash(folder, target) if drafter_kind(folder) == DFLASH else open_eagle(folder, target)
    return lambda: TappedDrafter(head, name or folder.name)


def open_layer(target: ModelSource) -> MakeDrafter:
    """The MTP layer of a checkpoint. Raises ModelError, DrafterFailed."""
    layer = open_mtp(target)
    return lambda: TappedDrafter(layer)


def open_trained(path: Path, target: ModelSource) -> MakeDrafter:
    """What `swarm-draft train` made. Raises ModelError, DrafterFailed."""
    dispatch.isa()  # the kernels take the number of threads that torch has when they are loaded
    with single_threaded():
        if read_card(path).taps:
            tapped = open_tapped_draft(path, target)
            return lambda: _with_store(TappedDrafter(tapped), tapped.store)
        trained = open_draft(path, target)
    return lambda: _with_store(ModelDrafter(trained, "trained draft"), trained.store)


def _with_store(drafter: Drafter, store: ContinuationStore | None) -> Drafter:
    return drafter if store is None else StoredDrafter(drafter, store)


def _folders(model: Path) -> list[tuple[Path, str]]:
    """Folders of drafters within a model's folder, and beside it where their names begin with its own."""
    stem = model.name.lower().removesuffix(".gguf")
    try:
        beside = [entry for entry in _entries(model.parent) if stem and entry.name.lower().startswith(stem)]
        inside = list(_entries(model)) if model.is_dir() else []
        folders = [entry for entry in (*inside, *beside) if entry != model and entry.is_dir()]
    except OSError:
        return []
    kinds = ((folder, drafter_kind(folder)) for folder in sorted(folders))
    return [(folder, kind) for folder, kind in kinds if kind is not None]


def _entries(folder: Path) -> Iterable[Path]:
    return islice(folder.iterdir(), MAX_ENTRIES)
