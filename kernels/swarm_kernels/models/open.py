"""Opens a ModelSource by the name a user gives.

Owns the accepted names: a Hugging Face folder, a `.gguf` file, a hub id or a built-in name. Only safetensors
and GGUF are ever read; no pickle is loaded and no code from a model is run.
"""

from __future__ import annotations

import os
from pathlib import Path

from swarm.errors import CorruptModel, ModelError, ModelNotFound, UnsupportedModel, UsageError
from swarm_kernels.models import builtin
from swarm_kernels.models.gguf import GgufSource
from swarm_kernels.models.gguf_parts import unsplit_name
from swarm_kernels.models.hub.cache import RepoCache
from swarm_kernels.models.hub.listing import REPO, Listing
from swarm_kernels.models.hub.policy import POLICY
from swarm_kernels.models.hub.repo import HubRepo
from swarm_kernels.models.hub.stamps import sha256_of
from swarm_kernels.models.hub_source import HubSource
from swarm_kernels.models.safetensors import INDEX, PICKLES, SafetensorsSource
from swarm_kernels.models.source import ModelSource

__all__ = ["ModelSource", "open_model"]

_SMALL_FILES = (".json", ".jinja")  # config, index, tokenizer and chat template


def open_model(spec: str, cache_dir: Path | None = None, *, expected_sha256: str | None = None) -> ModelSource:
    """Open a model by folder, `.gguf` file, hub id ("org/name", "org/name@revision") or built-in name.

    A GGUF model in several parts is opened by any of them. `cache_dir`: where downloads are cached, by default the
    swarm's or Hugging Face's folder. `expected_sha256`: hash of the one weight file, hex. Raises ModelNotFound,
    CorruptModel, UnsupportedModel, DiskFull, and UsageError when a hash is given for weights in several files.
    """
    if spec in builtin.MODELS:
        return GgufSource(_checked(builtin.ensure(spec, cache_dir), expected_sha256), spec)
    path = Path(os.path.expanduser(spec))
    if os.path.isfile(path):  # not Path.is_file, which lets "permission denied" and "name too long" through as OSError
        return _open_file(path, expected_sha256)
    if spec and os.path.isdir(path):
        return _open_folder(path, None, expected_sha256)
    repo, _, revision = spec.partition("@")
    if REPO.fullmatch(repo) and ".." not in repo and path.suffix != ".gguf":
        return _open_hub(repo, revision or None, cache_dir, expected_sha256)
    if path.suffix == ".gguf" or "/" in spec or "\\" in spec:
        raise ModelNotFound(f"there is no model at {spec[:200]}")
    raise ModelNotFound(
        f"'{spec[:200]}' is no model: give a folder, a .gguf file, a Hugging Face id such as org/name, "
        f"or a built-in model ({', '.join(builtin.MODELS)})"
    )


def _open_file(path: Path, expected_sha256: str | None) -> ModelSource:
    if path.suffix == ".safetensors":
        raise UsageError(f"{path} is one file of a model; give the folder it lies in, which holds its config.json")
    return GgufSource(_checked(path, expected_sha256))


def _open_folder(folder: Path, name: str | None, expected_sha256: str | None) -> ModelSource:
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs and not any(folder.glob("*.safetensors")):
        if len({unsplit_name(path) for path in ggufs}) > 1:
            raise ModelNotFound(f"{folder} holds {len(ggufs)} GGUF files; name one of them, for instance {ggufs[0]}")
        return GgufSource(_checked(ggufs[0], expected_sha256), name)
    if expected_sha256 is not None:
        files = sorted(folder.glob("*.safetensors"))
        if len(files) != 1 or (folder / INDEX).is_file():
            raise UsageError(f"a SHA-256 can be checked for a model in one file only, and {folder} is not that")
        _checked(files[0], expected_sha256)
    return SafetensorsSource(folder, name)


def _checked(path: Path, expected_sha256: str | None) -> Path:
    """`path`, after its hash was checked."""
    if expected_sha256 is None:
        return path
    if unsplit_name(path) != path.stem:
        raise UsageError(f"a SHA-256 can be checked for a model in one file only, and {path} is a part of one")
    found = sha256_of(path)
    if found != expected_sha256.strip().lower():
        raise CorruptModel(f"{path} has the SHA-256 {found}, not the expected {expected_sha256}; fetch it again")
    return path


def _open_hub(repo: str, revision: str | None, cache_dir: Path | None, expected_sha256: str | None) -> ModelSource:
    """A model on the hub: its small files are fetched now, its weights when they are needed."""
    hub = HubRepo.open(repo, revision, cache_dir)
    weights = hub.listing.with_suffix(".safetensors")
    if not weights:
        raise _not_readable(hub.listing)
    if expected_sha256 is not None:
        if len(weights) != 1:
            raise UsageError(f"a SHA-256 can be checked for a model in one file only, and {repo} is not that")
        stated = hub.listing.find(weights[0]).content_hash
        if stated != expected_sha256.strip().lower():
            raise CorruptModel(f"{weights[0]} of {repo} has the SHA-256 {stated}, not the expected {expected_sha256}")
    small = [file for file in hub.listing.files.values() if file.name.endswith(_SMALL_FILES)]
    small = [file for file in small if file.size <= POLICY.max_json_bytes][: POLICY.max_json_files]
    hub.fetch(file.name for file in small)
    return HubSource(hub)


def open_cached(repo: str, cache_dir: Path | None = None) -> HubSource | None:
    """A model on a hub as far as it is known here, without asking the hub; None if that is too little. Raises
    ModelError."""
    hub = HubRepo.cached(RepoCache.of(repo, cache_dir))
    return HubSource(hub) if hub is not None and (hub.folder / "config.json").is_file() else None


def _not_readable(listing: Listing) -> ModelError:
    if listing.with_suffix(".gguf"):
        return ModelNotFound(f"{listing.repo} has GGUF files only; fetch one of them and give its path")
    if any(name.endswith(PICKLES) for name in listing.files):
        return UnsupportedModel(
            f"{listing.repo} has only pickle files (*.bin, *.pt), which are never loaded because they can run any "
            "code; use another repository, with safetensors files"
        )
    return ModelNotFound(f"{listing.repo} has no *.safetensors file")
