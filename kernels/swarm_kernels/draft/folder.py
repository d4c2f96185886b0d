"""Folders of drafters that read hidden states: one safetensors file and a config.json, here or on a hub. What all kinds
of them share.

Owns which kind a folder holds, and the reasons to refuse its files that do not depend on the kind. Two layouts are in
use: `speculators` (`speculators_model_type`, the layer's config in `transformer_layer_config`), and releases, whose
config is the layer's own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from swarm.errors import CorruptModel, DrafterFailed, ModelError, ModelNotFound, UnsupportedModel
from swarm.types import MAX_TAPS
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.config_reader import brief
from swarm_kernels.models.hub.listing import REPO
from swarm_kernels.models.hub.policy import POLICY
from swarm_kernels.models.hub.repo import HubRepo
from swarm_kernels.models.safetensors import PICKLES, StoredTensor, read_header, read_json, read_tensor
from swarm_kernels.models.source import ModelFile

EAGLE, DFLASH = "eagle3", "dflash"
_LAYER_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "hidden_act",
    "attention_bias", "mlp_bias",
)  # fmt: skip

Shapes = dict[str, tuple[int, ...]]


def drafter_kind(folder: Path) -> str | None:
    """EAGLE or DFLASH if a folder says that it holds such a drafter; EAGLE also for another one of `speculators`, which
    is refused there."""
    try:
        hf = read_json(folder / "config.json")
    except ModelError:
        return None
    if hf.get("speculators_model_type") == DFLASH or "dflash_config" in hf:
        return DFLASH
    return EAGLE if any(key in hf for key in ("speculators_model_type", "draft_vocab_size", "eagle_config")) else None


def fetched_folder(spec: str, cache_dir: Path | None = None) -> Path | None:
    """The folder of a drafter on a Hugging Face hub ("org/name", "org/name@revision"), with its files; None if `spec`
    is no such name, or what has it there is no drafter. Raises ModelNotFound, CorruptModel, DiskFull."""
    repo, _, revision = spec.partition("@")
    if not REPO.fullmatch(repo) or ".." in repo or Path(spec).exists():
        return None
    hub = HubRepo.open(repo, revision or None, cache_dir)
    config = hub.listing.files.get("config.json")
    if config is None or config.size > POLICY.max_json_bytes:
        return None
    hub.fetch([config.name])
    if drafter_kind(hub.folder) is None:
        return None
    weights = hub.listing.with_suffix(".safetensors")
    if len(weights) != 1:
        raise ModelNotFound(f"{repo} has {len(weights)} safetensors files; a drafter is one")
    hub.fetch(weights)
    return hub.folder


def layer_fields(hf: Mapping[str, Any], where: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """-> the fields of one Llama-like layer, and the table that they are from. Raises CorruptModel."""
    inner = hf.get("transformer_layer_config", hf) if "speculators_model_type" in hf else hf
    if not isinstance(inner, Mapping):
        raise CorruptModel(f"{where}: transformer_layer_config is not a table")
    return {key: inner[key] for key in _LAYER_FIELDS if inner.get(key) is not None}, inner


def table(hf: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """A table within the config, empty if it is not there. Raises CorruptModel."""
    nested = hf.get(key)
    if nested is not None and not isinstance(nested, Mapping):
        raise CorruptModel(f"{where}: {key} is not a table")
    return nested or {}


def check_target(hidden_size: int, vocab_size: int, draft_vocab: int, target: ModelConfig, folder: Path) -> None:
    """Raises DrafterFailed for a drafter of another model, or one that no drafter can read."""
    if target.rows.streams > 1:
        raise DrafterFailed(f"models of type {target.model_type} have {target.rows.streams} hidden states a token")
    if (hidden_size, vocab_size) != (target.hidden_size, target.vocab_size) or draft_vocab > target.vocab_size:
        raise DrafterFailed(
            f"the drafter in {folder} is for a model with hidden states of {hidden_size} and a vocabulary of "
            f"{vocab_size}, not of {target.hidden_size} and {target.vocab_size}; use one trained for this model"
        )


def tap_list(given: object, offset: int, num_layers: int, where: str) -> tuple[int, ...]:
    """Taps, as `swarm.tap_messages` counts them, from the list `given`, whose numbers are `offset` less. Raises
    CorruptModel, DrafterFailed."""
    whole = isinstance(given, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in given)
    if not isinstance(given, list) or not whole or not 1 <= len(given) <= MAX_TAPS:
        raise CorruptModel(f"{where}: the taps are {brief(given)}, not a list of 1 to {MAX_TAPS} layers")
    taps = tuple(i + offset for i in given)
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > num_layers:
        raise DrafterFailed(f"{where}: the drafter reads at layers {brief(given)} of a model that has {num_layers}")
    return taps


def read_tensors(
    folder: Path, shapes: Shapes, optional: Shapes, unread: Collection[str], rename: Mapping[str, str], kind: str
) -> dict[str, torch.Tensor]:
    """The tensors of the folder's file. `shapes`, `optional`: of those that must be there, and those that may;
    `unread`: of the latter, those that nothing is computed with; `rename`: beginnings of names. Raises ModelNotFound,
    CorruptModel, UnsupportedModel."""
    with closing(ModelFile(_weight_file(folder, kind))) as file:
        stored = {_plain_name(name, rename): tensor for name, tensor in read_header(file).items()}
        _check(stored, shapes, optional, folder, kind)
        return {name: read_tensor(tensor, name) for name, tensor in stored.items() if name not in unread}


def target_ids(offsets: torch.Tensor | None, draft_vocab: int, target: ModelConfig, folder: Path) -> torch.Tensor:
    """The target's ids `[draft_vocab]` of the draft's tokens. `offsets`: how far each is above the draft's, None if
    they are the same. Raises CorruptModel."""
    ids = torch.arange(draft_vocab)
    if offsets is not None:
        ids = ids + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
        raise CorruptModel(f"{folder}: d2t names tokens that the model does not have; fetch it again")
    return ids


def _weight_file(folder: Path, kind: str) -> Path:
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if not found and any(entry.suffix in PICKLES for entry in folder.iterdir()):
        raise UnsupportedModel(f"{folder} has only pickle files, which are never loaded because they can run any code")
    raise ModelNotFound(f"{folder} has {len(found)} safetensors files; {kind} drafter is one")


def _plain_name(name: str, rename: Mapping[str, str]) -> str:
    name = name.removeprefix("model.")
    for old, new in rename.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _check(stored: Mapping[str, StoredTensor], expected: Shapes, optional: Shapes, folder: Path, kind: str) -> None:
    """Raises CorruptModel, and UnsupportedModel for tensors that are not known."""
    if unknown := sorted(stored.keys() - expected.keys() - optional.keys()):
        raise UnsupportedModel(f"{folder}: '{unknown[0][:80]}' is no part of {kind} drafter that is run here")
    for name, shape in (expected | optional).items():
        found = stored[name].shape if name in stored else None
        if found != shape and (found is not None or name in expected):
            raise CorruptModel(f"{folder}: {name} has shape {found or 'none'}, its config needs {shape}")
    floats = (expected | optional).keys() - {"d2t", "t2d"}
    wrong = sorted(n for n in floats & stored.keys() if not stored[n].dtype.startswith(("F32", "F16", "BF16")))
    if wrong:
        raise CorruptModel(f"{folder}: {wrong[0]} is {stored[wrong[0]].dtype}, which its layers do not compute with")
    if "d2t" in stored and not stored["d2t"].dtype.startswith("I"):
        raise CorruptModel(f"{folder}: d2t is {stored['d2t'].dtype}, not whole numbers")
