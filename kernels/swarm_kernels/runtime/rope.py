"""Rotary embeddings: inverse frequencies with every scaling that fast-path models use, and tables of their cosines and
sines.

Owns the arithmetic of `transformers.modeling_rope_utils` (same names and defaults), so that a span agrees with
transformers to the bit in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from swarm.errors import CorruptModel, UnsupportedModel
from swarm_kernels.models.config import ModelConfig, RopeConfig

_INITIAL_ROWS = 2048


class RopeTables:
    """A table for each kind of layer of a model, see `LayerSpec.rope`."""

    def __init__(self, ropes: Sequence[RopeConfig], head_dim: int, context_length: int, device: torch.device) -> None:
        """Raises as `RopeTable`, and UnsupportedModel for tables of different widths."""
        self._tables = [RopeTable(rope, head_dim, context_length, device) for rope in ropes]
        if len({table.dim for table in self._tables}) > 1:
            raise UnsupportedModel("layers that rotate different numbers of dimensions do not run on compiled kernels")

    def at(self, positions: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `RopeTable.at`; of several tables `[tables, n, rot]`."""
        if len(self._tables) == 1:
            return self._tables[0].at(positions, largest)
        cos, sin = zip(*(table.at(positions, largest) for table in self._tables), strict=True)
        return torch.stack(cos), torch.stack(sin)


class RopeTable:
    """Cosines and sines `[positions, rot]` in fp32 (Hugging Face's convention: both halves); it grows on demand."""

    def __init__(self, rope: RopeConfig, head_dim: int, context_length: int, device: torch.device) -> None:
        """Raises UnsupportedModel for an unknown scaling, CorruptModel for one with missing values."""
        self._rope = rope
        self.dim = rope.dim or head_dim
        self._context = context_length
        self._device = device
        if self.dim < 2 or self.dim % 2:
            raise CorruptModel(f"the model rotates {self.dim} dimensions of a head, which must be an even number")
        try:
            self._inv_freq, self._factor = inverse_frequencies(rope, self.dim, context_length)
            if _kind(rope.scaling) == "dynamic":
                self._dynamic_angles(torch.arange(1))
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise CorruptModel(f"the model's rope scaling is incomplete or malformed: {error!r:.200}") from None
        self._rows = 0
        self._cos = self._sin = torch.empty(0, self.dim, device=device)

    def at(self, positions: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`positions [n]` int64, none above `largest` -> cos, sin `[n, rot]` fp32."""
        if largest >= self._rows:
            self._grow(largest + 1)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _grow(self, rows: int) -> None:
        rows = max(rows, 2 * self._rows, min(_INITIAL_ROWS, self._context))
        positions = torch.arange(rows)
        angles = positions[:, None].float() * self._inv_freq
        if _kind(self._rope.scaling) == "dynamic" and rows > self._context:
            angles[self._context :] = self._dynamic_angles(positions[self._context :])
        both = torch.cat((angles, angles), -1)
        self._cos = (both.cos() * self._factor).to(self._device)
        self._sin = (both.sin() * self._factor).to(self._device)
        self._rows = rows

    def _dynamic_angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Beyond the context, NTK's base grows with the sequence; a row takes the length that ends with itself.

        transformers takes the longest row of the batch instead, so its keys depend on prefill chunking; these do not.
        """
        scaling = self._rope.scaling or {}
        ratio = scaling["factor"] * (positions.double() + 1) / self._context - (scaling["factor"] - 1)
        bases = self._rope.theta * ratio ** (self.dim / (self.dim - 2))
        exponents = torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim
        angles: torch.Tensor = positions[:, None].float() * (1.0 / bases.float()[:, None] ** exponents)
        return angles


def inverse_frequencies(rope: RopeConfig, dim: int, context_length: int) -> tuple[torch.Tensor, float]:
    """-> (`inv_freq [dim / 2]` fp32, factor of cosines and sines). Raises UnsupportedModel, KeyError, ValueError."""
    scaling = rope.scaling or {}
    kind = _kind(rope.scaling)
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if kind in ("default", "dynamic"):
        return plain, 1.0
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(plain, scaling, context_length), 1.0
    if kind == "yarn":
        return _yarn(rope.theta, dim, scaling, context_length)
    if kind == "longrope":
        return _longrope(rope.theta, dim, scaling, context_length)
    raise UnsupportedModel(f"rope scaling '{kind}' is not supported for this model family")


def _kind(scaling: Mapping[str, Any] | None) -> str:
    if not scaling:
        return "default"
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def _llama3(inv_freq: torch.Tensor, scaling: Mapping[str, Any], context_length: int) -> torch.Tensor:
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between interpolated."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    old_context = scaling.get("original_max_position_embeddings") or context_length
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > old_context / low, inv_freq / factor, inv_freq)
    smooth = (old_context / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelength < old_context / high) & ~(wavelength > old_context / low)
    return torch.where(between, smoothed, scaled)


def _longrope(theta: float, dim: int, scaling: Mapping[str, Any], context_length: int) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding et al. 2024) within the trained context: a divisor for each frequency. Beyond it, transformers
    turns all tokens of a text by other divisors, so that spans end there: `limited_context`."""
    old_context = scaling["original_max_position_embeddings"]
    divisors = torch.tensor(scaling["short_factor"], dtype=torch.float32)
    if divisors.shape != (dim // 2,) or not bool((divisors > 0).all()) or old_context < 1:
        raise ValueError(f"{divisors.numel()} short factors for {dim // 2} frequencies within {old_context} tokens")
    factor = scaling.get("factor")
    if factor is None:
        factor = context_length / old_context
    scale = scaling.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(old_context))
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / (divisors * theta**exponents), float(scale)


def limited_context(config: ModelConfig) -> ModelConfig:
    """The context up to which a row does not depend on its batch: LongRoPE changes all frequencies once a sequence
    outgrows the trained context."""
    scaling = config.rope.scaling or {}
    trained = scaling.get("original_max_position_embeddings")
    if scaling.get("rope_type") != "longrope" or not isinstance(trained, int) or trained < 1:
        return config
    return replace(config, context_length=min(config.context_length, trained))


def _yarn(theta: float, dim: int, scaling: Mapping[str, Any], context_length: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023, section 3): interpolate slow rotations, keep fast ones, ramp between `beta_*` turns."""
    old_context = scaling.get("original_max_position_embeddings") or context_length
    factor = scaling.get("factor")
    if factor is None:
        factor = context_length / old_context
    steps = theta ** (torch.arange(0, dim, 2).float() / dim)
    low = _turns_to_dim(scaling.get("beta_fast") or 32, theta, dim, old_context)
    high = _turns_to_dim(scaling.get("beta_slow") or 1, theta, dim, old_context)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    inv_freq = 1.0 / (factor * steps) * (1 - kept) + 1.0 / steps * kept
    return inv_freq, _yarn_attention_factor(factor, scaling)


def _turns_to_dim(turns: float, theta: float, dim: int, old_context: int) -> float:
    return (dim * math.log(old_context / (turns * 2 * math.pi))) / (2 * math.log(theta))


def _yarn_attention_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)
