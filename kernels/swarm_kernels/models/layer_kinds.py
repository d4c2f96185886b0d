"""What the layers of a config see, as `LayerSpec`s: what families of decoders share.

Owns the reading of `layer_types` and windows, and `Beyond`. `families` and `mixture_families` own the families.
"""

from __future__ import annotations

from collections.abc import Callable

from swarm_kernels.models.config import LayerSpec, ModelConfig
from swarm_kernels.models.config_reader import ConfigReader

FULL, SLIDING = "full_attention", "sliding_attention"

Layers = tuple[LayerSpec, ...]


class Beyond(Exception):
    """A field of the config has a value with which the compiled layers do not compute."""

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.field = field


def alike(read: ConfigReader, config: ModelConfig) -> Layers:
    """Layers with full attention; a window is refused, which transformers' class passes over."""
    check_all_full(read)
    window = read.get("sliding_window")
    if window is not None and (not isinstance(window, int) or window < config.context_length):
        raise Beyond("sliding_window")
    return (LayerSpec(),) * config.num_layers


def all_windowed(read: ConfigReader, config: ModelConfig) -> Layers:
    """Layers that all have the window, if there is one."""
    check_all_full(read)
    window = None if read.get("sliding_window") is None else window_of(read)
    if window is not None and read.get("layer_types"):
        raise Beyond("layer_types")
    return (LayerSpec(window),) * config.num_layers


def by_kind(
    read: ConfigReader, config: ModelConfig, is_sliding: Callable[[int], bool], sliding_rope: int = 0
) -> Layers:
    """Layers by `layer_types`, without which `is_sliding` says which have a window."""
    kinds = read.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if is_sliding(layer) else FULL for layer in range(config.num_layers)]
    known = isinstance(kinds, list) and len(kinds) == config.num_layers
    if not known or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise Beyond("layer_types")
    sliding = LayerSpec(window_of(read), sliding_rope) if SLIDING in kinds else LayerSpec()
    return tuple(sliding if kind == SLIDING else LayerSpec() for kind in kinds)


def window_of(read: ConfigReader) -> int:
    window = read.get("sliding_window")
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise Beyond("sliding_window")
    return window


def check_all_full(read: ConfigReader) -> None:
    kinds = read.get("layer_types")
    if kinds and (not isinstance(kinds, list) or any(kind != FULL for kind in kinds)):
        raise Beyond("layer_types")
