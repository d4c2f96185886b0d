"""What a row between two layers is made of, as a function of the config and the cut: nearly always hidden states.

In models with per-layer embeddings (Gemma 3n, the small Gemma 4) a row that crosses the cut before layer c holds, in
this order, the hidden states (in Gemma 3n of all AltUp streams), the per-layer inputs of layers c, c + 1, ..., and the
keys and values of each earlier layer whose keys a layer from c on takes over. So only the first hop needs token ids,
and no hop needs another one's cache. Everything that counts bytes of rows asks here. Reads no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarm.errors import CorruptModel, UnsupportedModel
from swarm_kernels.models.config_reader import MAX_LAYERS, ConfigReader, brief

_SLIDING, _FULL = "sliding_attention", "full_attention"
_STREAMS = {"gemma3n_text": 4, "gemma4_text": 1}
"""Types whose rows may be wide, and their streams by default."""
_MOST_STREAMS = 64
_PERIOD = {"gemma3n_text": 5, "gemma4_text": 6}  # of layers, the last of which has full attention
_SHARED = {"gemma3n_text": 15, "gemma4_text": 0}
_KV_HEADS = {"gemma3n_text": 2, "gemma4_text": 4}


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Where a row holds the keys of `layer`, `[heads, dim]` from number `start` on, and then its values."""

    layer: int
    heads: int
    dim: int
    start: int

    @property
    def size(self) -> int:
        """Numbers of the keys; the values take as many."""
        return self.heads * self.dim


@dataclass(frozen=True, slots=True)
class RowLayout:
    """`per_layer`: numbers of a layer's input. `sources`: by layer, the earlier one whose keys and values it takes
    over; empty if none does. `kv_shapes`: by layer, key heads and their size, where layers differ in them."""

    hidden_size: int
    num_layers: int
    streams: int = 1
    per_layer: int = 0
    sources: tuple[int | None, ...] = ()
    kv_shapes: tuple[tuple[int, int], ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether rows are hidden states at every cut."""
        return self.streams == 1 and not self.per_layer

    @property
    def states(self) -> int:
        """Numbers of the hidden states of all streams, with which every row begins."""
        return self.streams * self.hidden_size

    @property
    def widest(self) -> int:
        return self.states if self.is_plain else max(map(self.width, range(self.num_layers + 1)))

    def width(self, cut: int) -> int:
        """Numbers of a row that layer `cut` reads, or the last norm where there is none."""
        return self._keys_start(cut) + sum(2 * keys.size for keys in self.shared_keys(cut))

    def parts(self, cut: int) -> tuple[int, ...]:
        """The numbers of each part of a row, of which every one is compared by itself: hidden states, inputs, keys and
        values."""
        inputs = self._keys_start(cut) - self.states
        return (self.states, *((inputs,) if inputs else ()), *(2 * keys.size for keys in self.shared_keys(cut)))

    def per_layer_inputs(self, cut: int) -> slice:
        """Of the layers from `cut` on."""
        return slice(self.states, self._keys_start(cut))

    def shared_keys(self, cut: int) -> list[SharedKeys]:
        """Of the layers before `cut` that some layer from there on takes over."""
        found, at = [], self._keys_start(cut)
        for layer in sorted({source for source in self.sources[cut:] if source is not None and source < cut}):
            found.append(SharedKeys(layer, *self.kv_shapes[layer], at))
            at += 2 * found[-1].size
        return found

    def _keys_start(self, cut: int) -> int:
        return self.states + (self.num_layers - cut) * self.per_layer

    @property
    def kv_elements(self) -> int:
        """Numbers that a token takes in the cache of one layer: there is room for those of any."""
        return 2 * math.lcm(*(heads for heads, _ in self.kv_shapes)) * max(dim for _, dim in self.kv_shapes)


def row_layout(read: ConfigReader, num_layers: int, hidden_size: int) -> RowLayout | None:
    """Of a type whose rows may be wide, or whose layers differ in their keys; None for others, whose rows are hidden
    states. Raises CorruptModel, UnsupportedModel."""
    kind = read.model_type
    if kind not in _STREAMS:
        return None
    kinds = _layer_kinds(read, num_layers)
    per_layer = _count(read, "hidden_size_per_layer_input", 256)
    sources = _sources(read, kinds, _count(read, "num_kv_shared_layers", _SHARED[kind], most=num_layers - 1))
    if sources and not per_layer:  # transformers itself fails on prompts
        raise UnsupportedModel(f"{read.where}: layers share keys and values and have no inputs of their own")
    streams = read.size("altup_num_inputs", _STREAMS[kind], _MOST_STREAMS) if kind == "gemma3n_text" else 1
    shapes = tuple(_kv_shape(read, layer, kinds[layer]) for layer in range(num_layers))
    return RowLayout(hidden_size, num_layers, streams, per_layer, sources, shapes)


def _count(read: ConfigReader, key: str, default: int, most: int | None = None) -> int:
    """A size that may be 0."""
    value = read.get(key)
    if value == 0 and value is not False:
        return 0
    if value is None and not default:
        return 0
    return read.size(key, default) if most is None else read.size(key, min(default, most), most)


def _layer_kinds(read: ConfigReader, num_layers: int) -> list[str]:
    kinds = read.get("layer_types")
    if kinds is None:
        period = _PERIOD[read.model_type]
        kinds = [_SLIDING if (layer + 1) % period else _FULL for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (_SLIDING, _FULL) for kind in kinds):
        raise CorruptModel(f"{read.where}: layer_types is {brief(kinds)}, not the kind of each of {num_layers} layers")
    forced = [_FULL] if read.model_type == "gemma4_text" else kinds[-1:]
    return [*kinds[:-1], *forced]


def _sources(read: ConfigReader, kinds: list[str], shared: int) -> tuple[int | None, ...]:
    """The last layers take over the keys of the last one of their kind before them."""
    if not shared:
        return ()
    own = kinds[: len(kinds) - shared]
    if set(own) != set(kinds):
        raise CorruptModel(f"{read.where}: no layer has the keys and values that the last {shared} layers take over")
    last = {kind: len(own) - 1 - own[::-1].index(kind) for kind in set(kinds)}
    return (*(None for _ in own), *(last[kind] for kind in kinds[len(own) :]))


def _kv_shape(read: ConfigReader, layer: int, kind: str) -> tuple[int, int]:
    heads, dim = read.size("num_key_value_heads", _KV_HEADS[read.model_type]), read.size("head_dim", 256)
    if read.model_type != "gemma4_text":
        return heads, dim
    own: Any = {}
    by_layer = read.get("per_layer_config")
    if isinstance(by_layer, Mapping) and len(by_layer) <= MAX_LAYERS:
        own = by_layer.get(str(layer), by_layer.get(layer, {}))
    elif by_layer is not None:
        own = by_layer
    elif kind == _FULL:
        own = {"head_dim": read.size("global_head_dim", 512)}
        if read.flag("attention_k_eq_v", False) and read.get("num_global_key_value_heads") is not None:
            own["num_key_value_heads"] = read.size("num_global_key_value_heads")
    if not isinstance(own, Mapping):
        raise CorruptModel(f"{read.where}: per_layer_config is {brief(by_layer)}, not the sizes of layers")
    layers = ConfigReader({"model_type": read.model_type, **own}, read.where)
    return layers.size("num_key_value_heads", heads), layers.size("head_dim", dim)
