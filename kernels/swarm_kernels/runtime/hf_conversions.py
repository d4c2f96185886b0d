"""Which tensors of a model's files make up which parameter of transformers' model, by transformers' own conversions.

Owns reading them piece by piece: transformers would put a layer's experts together first. `hf_packing` packs them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from swarm.errors import CorruptModel, UnsupportedModel
from swarm_kernels.models.source import ModelSource

_LAYER_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")


def layer_of(name: str) -> int | None:
    """The layer a stored tensor belongs to: the first number in its name, None without one."""
    found = _LAYER_NUMBER.search(name)
    return int(found[1]) if found else None


@dataclass(slots=True)
class StoredParameter:
    """`parts`: names of stored tensors in their natural order, by the converter's source pattern; without a converter
    the one tensor."""

    converter: Any = None  # WeightConverter
    parts: dict[str, list[str]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [name for names in self.parts.values() for name in names]

    @property
    def sole(self) -> str | None:
        """The tensor that is the parameter, but for its name."""
        return self.names[0] if self.converter is None and self.parts else None

    def pieces(self) -> int | None:
        """How many tensors of each part are stacked, as transformers first does with experts; None: not that."""
        from transformers.core_model_loading import MergeModulelist

        if self.converter is None:
            return None
        first = self.converter.operations[0]
        counts = {len(names) for names in self.parts.values()}
        whole = set(self.parts) == set(self.converter.source_patterns)
        return (
            counts.pop()
            if isinstance(first, MergeModulelist) and first.dim == 0 and len(counts) == 1 and whole
            else None
        )

    def whole(self, source: ModelSource) -> torch.Tensor:
        """The whole parameter. Raises CorruptModel."""
        if self.converter is None:
            return source.tensor(self.names[0])
        return self._convert(
            {pattern: [source.tensor(name) for name in names] for pattern, names in self.parts.items()}
        )

    def piece_names(self, index: int) -> list[str]:
        """Stored tensors of one piece, in the converter's order."""
        return [self.parts[pattern][index] for pattern in self.converter.source_patterns]

    def is_concatenated(self) -> bool:
        """Whether a piece's tensors are just put together by their first dimension."""
        from transformers.core_model_loading import Concatenate

        rest = self.converter.operations[1:]
        return not rest or (len(rest) == 1 and isinstance(rest[0], Concatenate) and rest[0].dim == 1)

    def piece(self, source: ModelSource, index: int) -> torch.Tensor:
        """One piece of the parameter, without the dimension by which they are stacked. Raises CorruptModel."""
        return self._convert({pattern: [source.tensor(names[index])] for pattern, names in self.parts.items()})[0]

    def _convert(self, tensors: dict[str, Any]) -> torch.Tensor:
        patterns = {
            "source_patterns": self.converter.source_patterns,
            "target_patterns": self.converter.target_patterns,
        }
        try:
            for operation in self.converter.operations:
                tensors = operation.convert(tensors, **patterns)
        except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
            raise CorruptModel(
                f"{self.names[0]} and the tensors beside it do not fit: {type(error).__name__}"
            ) from None
        converted = next(iter(tensors.values()))
        tensor: torch.Tensor = converted[0] if isinstance(converted, list) else converted
        return tensor


def stored_parameters(causal_lm: Any, names: Iterable[str]) -> dict[str, StoredParameter]:
    """`names` of stored tensors -> what they make up, by the name of the parameter, as transformers loads them."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        raise UnsupportedModel("this version of transformers cannot convert the model's weights") from None
    mapping = get_model_conversion_mapping(causal_lm)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    parameters, prefix = causal_lm.state_dict(), causal_lm.base_model_prefix
    found: dict[str, StoredParameter] = {}
    for name in sorted(names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, parameters)
        if renamed not in parameters and name in parameters:
            renamed, pattern = name, None
        if renamed not in parameters:
            continue
        stored = found.setdefault(renamed, StoredParameter(by_pattern.get(pattern)))
        stored.parts.setdefault(pattern or name, []).append(name)
    return found
