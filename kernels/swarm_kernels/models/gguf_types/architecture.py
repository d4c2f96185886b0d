"""What is known of one GGUF architecture: how its config is made, and its tensors' names.

Owns the walk over a file's tensors. Every tensor belongs to a rule or is refused by its name; so does every part of a
rule. `table` lists the architectures. Reads no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swarm.errors import CorruptModel, UnsupportedModel
from swarm_kernels.models.gguf_types.metadata import GgufEntry, Metadata
from swarm_kernels.models.gguf_types.rope import FREQS, LONG, SHORT
from swarm_kernels.models.gguf_types.views import Build, View, whole

GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"blk\.(\d{1,5})\.(.+)")
_NOT_WEIGHTS = frozenset({FREQS, LONG, SHORT})
_MAX_VIEWS = 1 << 18  # DeepSeek-V3 has 46,000
_IGNORED = re.compile(r"attn_rot_embd\.weight|rope_freqs\.weight|attn_[qk]_scale\.weight")


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors `blk.N.{sources}`, all of them or none in a layer, -> `model.layers.N.{target}`."""

    sources: tuple[str, ...]
    target: str
    build: Build = whole


def rule(source: str, target: str, build: Build = whole) -> Rule:
    return Rule((source,), target, build)


def linear(source: str, target: str, build: Build = whole) -> list[Rule]:
    """A weight and its bias."""
    return [rule(f"{source}.{part}", f"{target}.{part}", build) for part in ("weight", "bias")]


@dataclass(frozen=True, slots=True)
class Architecture:
    """`config`: the Hugging Face config of a file, with `model_type`. `edges`: how the tensors outside all layers are
    read, where it is not `whole`."""

    config: Callable[[Metadata], dict[str, Any]]
    rules: tuple[Rule, ...]
    edges: Mapping[str, tuple[str, Build]]

    def views(self, tensors: Mapping[str, GgufEntry], config: Mapping[str, Any], where: str) -> dict[str, View]:
        """Hugging Face name -> view, of all tensors but those of layers beyond the last, which predict further tokens.

        Raises CorruptModel, UnsupportedModel."""
        views: dict[str, View] = {}
        layers: dict[int, dict[str, GgufEntry]] = {}
        for name, tensor in tensors.items():
            if match := _LAYER.fullmatch(name):
                layers.setdefault(int(match[1]), {})[match[2]] = tensor
            elif name in self.edges:
                target, build = self.edges[name]
                views.update(build((tensor,), config, target))
            elif name not in _NOT_WEIGHTS:
                raise _unknown(name, where)
        for layer in sorted(layers):
            if layer >= config["num_hidden_layers"]:
                continue
            for name, view in self._layer(layer, layers[layer], config, where):
                views[name] = view
                if len(views) > _MAX_VIEWS:
                    raise CorruptModel(f"{where} claims more than {_MAX_VIEWS} tensors and experts")
        return views

    def _layer(
        self, layer: int, stored: dict[str, GgufEntry], config: Mapping[str, Any], where: str
    ) -> Iterator[tuple[str, View]]:
        left = {suffix for suffix in stored if not _IGNORED.fullmatch(suffix)}
        for each in self.rules:
            found = [stored[source] for source in each.sources if source in stored]
            if not found:
                continue
            if len(found) < len(each.sources):
                raise CorruptModel(f"{where}: layer {layer} has only a part of {', '.join(each.sources)}")
            left -= set(each.sources)
            try:
                yield from each.build(found, config, f"model.layers.{layer}.{each.target}")
            except KeyError as missing:  # experts of a file whose metadata tell of none
                raise CorruptModel(f"{where}: layer {layer} has tensors that need {missing} in the metadata") from None
        if left:
            raise _unknown(f"blk.{layer}.{min(left)}", where)


def _unknown(name: str, where: str) -> UnsupportedModel:
    return UnsupportedModel(f"{where} has a tensor {name[:80]!r} that this architecture is not known to have")
