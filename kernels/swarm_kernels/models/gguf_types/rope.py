"""llama.cpp's metadata and tensors of the rotary embedding -> Hugging Face's `rope_parameters`. Pure."""

from __future__ import annotations

import math
from typing import Any

from swarm.errors import CorruptModel, UnsupportedModel
from swarm_kernels.models.gguf_types.metadata import Metadata

FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors of divisors, one for each pair of rotated dimensions."""

_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
_LLAMA3 = ((1.0, 4.0, 8192), (1.0, 1.0, 8192))
"""Low and high frequency factor and trained context: of Llama 3.x, and of Llama 4."""


def rope_parameters(meta: Metadata, context: int) -> dict[str, Any]:
    """Raises CorruptModel, UnsupportedModel."""
    theta = meta.number("rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    legacy = meta.number("rope.scale_linear")
    kind = meta.text("rope.scaling.type", "none" if legacy is None else "linear")
    factor = meta.number("rope.scaling.factor", legacy)
    original = meta.integer("rope.scaling.original_context_length")
    attention = meta.number("rope.scaling.attn_factor", 1.0)
    yarn = {name: meta.number(f"rope.scaling.{key}") for name, key in _YARN.items()}
    if LONG in meta.factors or SHORT in meta.factors:
        return rope | _longrope(meta, context, original, attention)
    if FREQS in meta.factors:
        return rope | _llama3_scaling(meta.factors[FREQS], float(theta or 10000.0), meta.where)
    if kind == "none" or factor in (None, 1.0):
        return rope
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return rope
    extended = meta.number("rope.scaling.yarn_attn_factor", 1.0)
    if kind != "yarn" or attention != 1.0 or extended != 1.0 or meta.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"{meta.where} scales its rotary embedding by {kind[:40]!r}, which is not read from GGUF"
        )
    rope["original_max_position_embeddings"] = original or context
    return rope | {name: value for name, value in yarn.items() if value is not None}


def partial_rotary(meta: Metadata, head_dim: int) -> float:
    """The fraction of a head's dimensions that is rotated."""
    rotated = meta.integer("rope.dimension_count", head_dim) or head_dim
    if not 0 < rotated <= head_dim or rotated % 2:
        raise CorruptModel(f"{meta.where}: {rotated} of the {head_dim} dimensions of a head cannot be rotated")
    return rotated / head_dim


def _longrope(meta: Metadata, context: int, original: int | None, attention: float | None) -> dict[str, Any]:
    if LONG not in meta.factors or SHORT not in meta.factors or not original or original < 2:
        raise CorruptModel(f"{meta.where}: the factors of its rotary embedding are incomplete")
    ratio = context / original
    expected = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    if not math.isclose(attention or 1.0, expected, rel_tol=1e-4):
        raise UnsupportedModel(f"{meta.where} scales its attention in a way that is not LongRoPE's")
    return {
        "rope_type": "longrope",
        "long_factor": list(meta.factors[LONG]),
        "short_factor": list(meta.factors[SHORT]),
        "original_max_position_embeddings": original,
    }


def _llama3_scaling(factors: tuple[float, ...], theta: float, where: str) -> dict[str, Any]:
    """Llama 3's scaling, recovered from the divisors of each frequency, `[head_dim / 2]`, all that llama.cpp stores.

    All releases share the constants beside the factor; the fit is checked.
    """
    factor = round(max(factors), 4)
    if not (0 < theta < math.inf and all(0 < given < math.inf for given in factors) and factor):
        raise CorruptModel(f"{where}: the factors of its rotary embedding are not positive numbers")
    for low, high, original in _LLAMA3:
        if _fits(factors, theta, factor, low, high, original):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModel(f"{where} scales its rotary embedding in a way that is not Llama 3's")


def _fits(factors: tuple[float, ...], theta: float, factor: float, low: float, high: float, original: int) -> bool:
    for i, given in enumerate(factors):
        turns = original / (2 * math.pi * theta ** (i / len(factors)))  # in the trained context
        if high == low:
            smooth = 1.0 if turns > high else 0.0
        else:
            smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        if not math.isclose(given, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-3):
            return False
    return True
