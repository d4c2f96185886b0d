"""Rotary parameters in a Hugging Face config -> RopeConfig, in all spellings: one table, or one by kind of layer.

Owns which parameters `rope.RopeTable` computes with; others send a model to transformers' layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarm.errors import CorruptModel
from swarm_kernels.models.config import RopeConfig
from swarm_kernels.models.config_reader import ConfigReader, brief, positive, word

_SCALED_FROM_CONTEXT = ("llama3", "yarn", "longrope")
_FIELDS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
        "attention_factor",
    }),
    "longrope": frozenset({
        "factor", "original_max_position_embeddings", "short_factor", "long_factor", "attention_factor",
    }),
}  # fmt: skip
"""Rope types that `rope.RopeTable` computes, and their parameters."""
_PASSED_OVER = frozenset({"finetuned", "original_max_position_embeddings", "factor"})
"""Parameters that transformers passes over where the rope type does not read them."""

_BY_KIND: Mapping[str, tuple[str, float, str, float]] = {
    "gemma3_text": ("rope_theta", 1e6, "rope_local_base_freq", 1e4),
    "olmo3": ("rope_theta", 5e5, "", 5e5),
}
"""Types with a table for full and one for sliding attention: the old names of their bases, and the defaults."""
_ROTATES_PARTLY = ("phi3", "glm4_moe", "minimax_m2")
_KINDS = ("full_attention", "sliding_attention")


def rope_configs(read: ConfigReader, head_dim: int, context: int) -> tuple[RopeConfig, tuple[RopeConfig, ...]]:
    """The table of most layers, or of those with full attention; and others, by `LayerSpec.rope`. Raises
    CorruptModel."""
    if read.model_type in _BY_KIND:
        full_key, full_theta, local_key, local_theta = _BY_KIND[read.model_type]
        given = read.get("rope_parameters") or {}
        full, local = (given.get(kind) or {} if isinstance(given, Mapping) else None for kind in _KINDS)
        scaling = read.get("rope_scaling") or {}
        if not (isinstance(full, Mapping) and isinstance(local, Mapping) and isinstance(scaling, Mapping)):
            raise CorruptModel(f"{read.where}: the rope parameters are not a table")
        first = _rope_config(read, {**full, **scaling}, read.get(full_key) or full_theta, head_dim, context)
        second = _rope_config(read, local, read.get(local_key) or local_theta, head_dim, context)
        return first, (second,)
    given = read.get("rope_scaling") or read.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise CorruptModel(f"{read.where}: the rope parameters are not a table")
    return _rope_config(read, given, read.get("rope_theta") or 10000.0, head_dim, context), ()


def _rope_config(
    read: ConfigReader, given: Mapping[str, Any], default_theta: Any, head_dim: int, context: int
) -> RopeConfig:
    scaling = dict(given)
    theta = positive(read.where, "rope_theta", scaling.pop("rope_theta", None) or default_theta)
    rotary = scaling.pop("partial_rotary_factor", None) or read.get("partial_rotary_factor")
    if rotary is None and read.model_type == "minimax_m2" and read.get("rotary_dim") is not None:
        rotary = read.size("rotary_dim") / head_dim
    rotary = rotary or 1.0
    if positive(read.where, "partial_rotary_factor", rotary) > 1:
        raise CorruptModel(f"{read.where}: partial_rotary_factor is {brief(rotary)}, more than all dimensions")
    dim = int(head_dim * rotary)
    legacy = scaling.pop("type", None)
    kind = word(read.where, "rope_type", scaling.get("rope_type") or legacy or "default")
    scaling["rope_type"] = "longrope" if read.model_type == "phi3" and kind in ("su", "yarn") else kind
    if scaling["rope_type"] in _SCALED_FROM_CONTEXT:
        original = read.get("original_max_position_embeddings")
        scaling.setdefault("original_max_position_embeddings", context if original is None else original)
    plain = scaling["rope_type"] == "default"
    return RopeConfig(theta, None if plain else scaling, None if dim == head_dim else dim)


def rope_fault(read: ConfigReader, hf: Mapping[str, Any]) -> str:
    """The first rotary field with which `rope.RopeTable` does not compute as transformers does; "" for none."""
    tables: list[tuple[str, Any]] = [(key, hf.get(key)) for key in ("rope_parameters", "rope_scaling")]
    if read.model_type in _BY_KIND:
        nested = hf.get("rope_parameters") or {}
        if not isinstance(nested, Mapping) or set(nested) - set(_KINDS):
            return "rope_parameters"
        tables = [(f"rope_parameters.{kind}", nested.get(kind)) for kind in _KINDS]
        tables.append(("rope_scaling", hf.get("rope_scaling")))
        if hf.get("original_max_position_embeddings") is not None:
            return "original_max_position_embeddings"
    for key, given in tables:
        if fault := _table_fault(read, key, given):
            return fault
    rope = hf.get("rope_parameters") or {}
    if hf.get("rope_scaling") and rope and hf["rope_scaling"] != rope:
        return "rope_scaling"
    scaling = hf.get("rope_scaling") or rope
    outer = read.get("original_max_position_embeddings")
    if outer is not None and scaling.get("original_max_position_embeddings", outer) != outer:
        return "original_max_position_embeddings"
    return "" if _may_rotate(read, hf.get("partial_rotary_factor")) else "partial_rotary_factor"


def _table_fault(read: ConfigReader, key: str, given: Any) -> str:
    if not isinstance(given, Mapping):
        return ""
    kind = given.get("rope_type") or given.get("type") or "default"
    if read.model_type == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"
    by_kind = read.model_type in _BY_KIND
    phi = read.model_type == "phi3" and kind not in ("default", "longrope")  # which transformers refuses
    if not isinstance(kind, str) or kind not in _FIELDS or phi or (by_kind and kind in ("dynamic", "longrope")):
        return f"{key}.rope_type"
    unread = set(map(str, given)) - _FIELDS[kind] - {"rope_type", "type", "rope_theta", *_PASSED_OVER}
    if "partial_rotary_factor" in unread and _may_rotate(read, given["partial_rotary_factor"]):
        unread.remove("partial_rotary_factor")
    return f"{key}.{min(unread)}" if unread else ""


def _may_rotate(read: ConfigReader, factor: Any) -> bool:
    """Whether transformers and `RopeTable` agree on a `partial_rotary_factor`: most types pass over it."""
    return factor is None or factor == 1 or read.model_type in _ROTATES_PARTLY
