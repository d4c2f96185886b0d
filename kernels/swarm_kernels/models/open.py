"""Opens a ModelSource by the name a user gives.

Owns the accepted names: a Hugging Face folder, a `.gguf` file, a hub id or a built-in name. Only safetensors
and GGUF are ever read; no pickle is loaded and no code from a model is run.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from swarm.errors import CorruptModel, ModelNotFound, UsageError
from swarm_kernels.models import builtin
from swarm_kernels.models.gguf import GgufSource
from swarm_kernels.models.safetensors import INDEX, SafetensorsSource
from swarm_kernels.models.source import ModelSource

__all__ = ["ModelSource", "open_model"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]


def open_model(spec: str, cache_dir: Path | None = None, *, expected_sha256: str | None = None) -> ModelSource:
    """Open a model by folder, `.gguf` file, hub id ("org/name") or built-in name ("smollm2-135m").

    `cache_dir`: where downloads are cached, by default the swarm's or Hugging Face's folder. `expected_sha256`: hash
    of the one weight file, hex. Raises ModelNotFound, CorruptModel, UnsupportedModel, and
    UsageError when a hash is given for weights in several files.
    """
    if spec in builtin.MODELS:
        return GgufSource(_checked(builtin.ensure(spec, cache_dir), expected_sha256), spec)
    path = Path(os.path.expanduser(spec))
    if os.path.isfile(path):  # not Path.is_file, which lets "permission denied" and "name too long" through as OSError
        return _open_file(path, expected_sha256)
    if spec and os.path.isdir(path):
        return _open_folder(path, None, expected_sha256)
    if _HUB_ID.fullmatch(spec) and path.suffix != ".gguf":
        return _open_folder(_fetch_from_hub(spec, cache_dir), spec, expected_sha256)
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
        if len(ggufs) > 1:
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
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected_sha256.strip().lower():
        raise CorruptModel(f"{path} has the SHA-256 {found}, not the expected {expected_sha256}; fetch it again")
    return path


def _fetch_from_hub(repo: str, cache_dir: Path | None) -> Path:
    """The snapshot's folder, downloaded unless the cache has it. Never fetches pickle files or code."""
    import huggingface_hub  # imported here: half a second, and most nodes open a file
    from huggingface_hub import errors

    failures: tuple[type[Exception], ...] = (OSError, ValueError, errors.HTTPError, errors.LocalEntryNotFoundError)  # type: ignore[attr-defined]
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo, cache_dir=cache_dir, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"], library_name="swarm"
            )
        )
    except errors.GatedRepoError:
        raise ModelNotFound(
            f"the model {repo} is gated; accept its licence on huggingface.co and run 'hf auth login'"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFound(f"Hugging Face has no model {repo}, or it is private; check its name") from None
    except failures as error:
        reason = type(error).__name__
        raise ModelNotFound(
            f"the model {repo} is neither in the local cache nor can it be fetched from huggingface.co ({reason}); "
            "check the network, or give a folder or a .gguf file"
        ) from None
