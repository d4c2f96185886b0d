"""Which models are on this machine's disk, what a model takes, and what this machine could hold of it.

Owns these figures. How they are shown is in `commands.models_command`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from swarm.config import data_dir
from swarm.errors import ModelError, ModelNotFound, OutOfMemory, UsageError
from swarm.types import LayerSpan
from swarm_kernels.device.device import DTYPES, available_memory, choose_device
from swarm_kernels.models import builtin
from swarm_kernels.models.hub.cache import RepoCache, cached_repos
from swarm_kernels.models.layers import layer_of, tensors_of_span
from swarm_kernels.models.open import open_cached, open_model
from swarm_kernels.models.source import ModelSource
from swarm_node.membership.memory_plan import POLICY, ModelMemory


class CachedModel(msgspec.Struct, frozen=True):
    """A model whose files swarm or another program fetched. `nbytes`: on the disk; `layers`: ranges that are whole, of
    `num_layers`, which is 0 if the files do not tell."""

    name: str
    nbytes: int
    layers: list[tuple[int, int]]
    num_layers: int
    folder: str


class DtypeNeeds(msgspec.Struct, frozen=True):
    """A model's parts in one number format, bytes in memory. `fits`: layers that this machine could hold, with room for
    keys and values; `fetch_bytes`: to be transferred for the first so many."""

    dtype: str
    layer: int  # the heaviest
    embedding: int
    head: int
    whole: int
    kv_token: int  # of one token in one layer
    fits: int
    fetch_bytes: int


class ModelNeeds(msgspec.Struct, frozen=True):
    """`stored_bytes`: of all weight tensors in their files; `budget`: memory that a node here would use."""

    name: str
    num_layers: int
    weight_hash: str
    stored_bytes: int
    missing_bytes: int
    layers_here: list[tuple[int, int]]
    budget: int
    free_disk: int
    dtypes: list[DtypeNeeds]


def cached_models() -> list[CachedModel]:
    """By name. Asks no hub; reads only tables."""
    found = [_builtin(name) for name in builtin.MODELS if _builtin_file(name).is_file()]
    for cache in cached_repos():
        layers: list[tuple[int, int]] = []
        num_layers = 0
        with contextlib.suppress(ModelError, OSError):
            source = open_cached(cache.repo, cache.root)
            if source is not None:
                with closing(source):
                    layers, num_layers = layers_here(source), source.config.num_layers
        found.append(CachedModel(cache.repo, cache.size(), layers, num_layers, str(cache.folder)))
    return sorted(found, key=lambda model: model.name)


def needs(spec: str, budget: int | None = None) -> ModelNeeds:
    """Of a model by the name that `--model` takes; of one on a hub, only its tables are fetched. `budget`: bytes; None:
    what a node here would take. Raises ModelError."""
    if budget is None:
        budget = int(POLICY.free_fraction * available_memory(choose_device(None)))
    with closing(open_model(spec)) as source:
        names = source.names()
        return ModelNeeds(
            name=source.name,
            num_layers=source.config.num_layers,
            weight_hash=source.weight_hash,
            stored_bytes=sum(map(source.nbytes, names)),
            missing_bytes=source.missing_bytes(names),
            layers_here=layers_here(source),
            budget=budget,
            free_disk=shutil.disk_usage(source.path).free,
            dtypes=[_in_dtype(source, name, budget) for name in DTYPES],
        )


def remove(name: str) -> int:
    """Delete what was fetched of a model. -> bytes freed. Raises ModelNotFound, UsageError."""
    if name in builtin.MODELS:
        file = _builtin_file(name)
        if not file.is_file():
            raise ModelNotFound(f"{name} is not on this machine")
        nbytes = file.stat().st_size
        with _deleting(name):
            file.unlink()
            builtin.stamp_path(file).unlink(missing_ok=True)
        return nbytes
    if os.path.exists(os.path.expanduser(name)):
        raise UsageError(f"{name} is a path; swarm deletes only what it fetched, so delete it yourself")
    cache = RepoCache.of(name.partition("@")[0])
    with _deleting(name):
        return cache.remove()


def layers_here(source: ModelSource) -> list[tuple[int, int]]:
    """Ranges `(start, end)` of layers whose weights are on this machine."""
    tensors: list[list[str]] = [[] for _ in range(source.config.num_layers)]
    for name in source.names():
        layer = layer_of(name, len(tensors))
        if layer is not None:
            tensors[layer].append(name)
    return _ranges(layer for layer, names in enumerate(tensors) if names and not source.missing_bytes(names))


def _missing(source: ModelSource, layers: LayerSpan) -> int:
    return source.missing_bytes(tensors_of_span(source, layers))


def _ranges(layers: Iterable[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for layer in layers:
        if found and found[-1][1] == layer:
            found[-1] = (found[-1][0], layer + 1)
        else:
            found.append((layer, layer + 1))
    return found


def _in_dtype(source: ModelSource, dtype: str, budget: int) -> DtypeNeeds:
    memory = ModelMemory.of(source, DTYPES[dtype])
    try:
        fits = memory.capacity(budget)
    except OutOfMemory:
        fits = 0
    whole = memory.span_bytes(LayerSpan(0, memory.num_layers))
    fetch = _missing(source, LayerSpan(0, fits)) if fits else 0
    return DtypeNeeds(dtype, memory.layer, memory.embedding, memory.head, whole, memory.kv_token, fits, fetch)


def _builtin(name: str) -> CachedModel:
    file = _builtin_file(name)
    layers: list[tuple[int, int]] = []
    num_layers = 0
    with contextlib.suppress(ModelError), closing(open_model(str(file))) as source:
        layers, num_layers = layers_here(source), source.config.num_layers
    return CachedModel(name, file.stat().st_size, layers, num_layers, str(file.parent))


def _builtin_file(name: str) -> Path:
    return data_dir() / "models" / builtin.MODELS[name].file_name


@contextlib.contextmanager
def _deleting(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelNotFound(f"{name} cannot be deleted: {error.strerror or type(error).__name__}") from None
