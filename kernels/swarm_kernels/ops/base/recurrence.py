"""Layers that carry a state from row to row: short convolutions and linear recurrences, and the ops in plain torch.

Owns which row continues which: rows of long runs, of draft trees and of several sessions in one call. Where states are
kept between calls is the cache's. `cpu.cpu_recurrence` has the compiled ops, `dispatch` picks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swarm.errors import KernelError

MAX_TAPS = 16

State = torch.Tensor | None
"""None: the initial state, all zeros."""


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """Row r continues the state that row `parent[r]` left, or, where that is negative, start `-1 - parent[r]`."""

    order: torch.Tensor  # [n] int32: every row, after its parent
    parent: torch.Tensor  # [n] int32
    starts: int
    saved: torch.Tensor  # [m] int32: the rows after which the state is wanted

    @classmethod
    def of(cls, order: Sequence[int], parent: Sequence[int], starts: int, saved: Sequence[int]) -> StateRows:
        tensors = [torch.tensor(numbers, dtype=torch.int32) for numbers in (order, parent, saved)]
        return cls(tensors[0], tensors[1], starts, tensors[2])


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """Causal, of each channel by itself. A state is the last `taps` inputs, `[C, taps]` in the inputs' dtype."""

    weight: torch.Tensor  # [taps, C] fp32, contiguous
    bias: torch.Tensor | None  # [C] fp32
    silu: bool


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    """Of each head: `S = exp(decay) S + key (x) u`, `out = scale query S + skip value`. With `corrects` (the delta
    rule, Yang et al. 2024) `u = beta (value - key (exp(decay) S))`, else `u = beta value` (Mamba-2, Lightning
    attention).

    Value head h has key head `h * G / H`. `decay`: of a head, or of each of its keys. With `eps` queries and keys are
    divided by their length, `sqrt(sum of squares + eps)`. A state is `[H, K, V]`, or `[H, V, K]` with `values_first`;
    fp32.
    """

    query: torch.Tensor  # [n, G, K]
    key: torch.Tensor  # [n, G, K]
    value: torch.Tensor  # [n, H, V]
    decay: torch.Tensor  # [n, H] or [n, H, K], logarithms
    beta: torch.Tensor | None = None  # [n, H]
    skip: torch.Tensor | None = None  # [H]
    scale: float = 1.0
    eps: float | None = None
    corrects: bool = False
    values_first: bool = False


def check_convolution(x: torch.Tensor, how: Convolution, rows: StateRows, starts: Sequence[State]) -> None:
    """Raises KernelError."""
    taps, channels = how.weight.shape
    fits = x.dim() == 2 and x.shape == (len(rows.order), channels) and x.dtype in (torch.float32, torch.bfloat16)
    if not fits or not 1 <= taps <= MAX_TAPS or (how.bias is not None and how.bias.shape != (channels,)):
        raise KernelError(f"a convolution of {taps} x {channels} weights was given {tuple(x.shape)} of {x.dtype}")
    _check_starts(rows, starts, (channels, taps))


def check_recurrence(how: Recurrence, rows: StateRows, starts: Sequence[State]) -> None:
    """Raises KernelError."""
    n, (_, groups, keys), (_, heads, values) = len(rows.order), how.key.shape, how.value.shape
    decays = ((n, heads), (n, heads, keys))
    vectors = ((how.beta, (n, heads)), (how.skip, (heads,)))
    fits = how.query.shape == how.key.shape == (n, groups, keys) and how.value.shape == (n, heads, values)
    if not fits or how.decay.shape not in decays or heads % groups:
        raise KernelError("the queries, keys, values and decays of a recurrence do not fit each other")
    if any(vector is not None and vector.shape != shape for vector, shape in vectors):
        raise KernelError("a recurrence has one beta for each row and head, and one skip for each head")
    _check_starts(rows, starts, (heads, values, keys) if how.values_first else (heads, keys, values))


def _check_starts(rows: StateRows, starts: Sequence[State], shape: tuple[int, ...]) -> None:
    if len(starts) != rows.starts or any(state is not None and state.shape != shape for state in starts):
        raise KernelError(f"{rows.starts} states of shape {shape} are needed")


def convolve(
    x: torch.Tensor, how: Convolution, rows: StateRows, starts: Sequence[State]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """See `dispatch.convolve`."""
    check_convolution(x, how, rows, starts)
    taps, channels = how.weight.shape
    output = torch.empty_like(x)

    def advance(row: int, state: State) -> torch.Tensor:
        before = x.new_zeros(channels, taps) if state is None else state.to(x.dtype)
        inputs = torch.cat((before[:, 1:], x[row][:, None]), 1)
        total = (inputs.float() * how.weight.T).sum(1) + (0 if how.bias is None else how.bias)
        total = total.to(x.dtype)
        output[row] = F.silu(total) if how.silu else total
        return inputs

    return output, _follow(rows, starts, advance)


def recur(how: Recurrence, rows: StateRows, starts: Sequence[State]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """See `dispatch.recur`."""
    check_recurrence(how, rows, starts)
    (n, groups, keys), (_, heads, values) = how.key.shape, how.value.shape
    query, key = (_unit(x.float(), how.eps).repeat_interleave(heads // groups, 1) for x in (how.query, how.key))
    query, value = query * how.scale, how.value.float()
    decay = how.decay.float().view(n, heads, -1, 1).exp()
    output = torch.empty(n, heads, values, device=value.device)

    def advance(row: int, state: State) -> torch.Tensor:
        before = value.new_zeros(heads, keys, values) if state is None else state.float()
        if how.values_first and state is not None:
            before = before.transpose(1, 2)
        kept, update = before * decay[row], value[row]
        if how.corrects:
            update = update - (kept * key[row][:, :, None]).sum(1)
        if how.beta is not None:
            update = update * how.beta[row].float()[:, None]
        after = kept + key[row][:, :, None] * update[:, None]
        output[row] = (after * query[row][:, :, None]).sum(1)
        if how.skip is not None:
            output[row] += how.skip.float()[:, None] * value[row]
        return after.transpose(1, 2).contiguous() if how.values_first else after

    return output, _follow(rows, starts, advance)


def _unit(x: torch.Tensor, eps: float | None) -> torch.Tensor:
    return x if eps is None else x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _follow(
    rows: StateRows, starts: Sequence[State], advance: Callable[[int, State], torch.Tensor]
) -> list[torch.Tensor]:
    """-> the states after the rows that are `saved`."""
    states: dict[int, torch.Tensor] = {}
    parents = rows.parent.tolist()
    for row in rows.order.tolist():
        parent = parents[row]
        states[row] = advance(row, starts[-1 - parent] if parent < 0 else states[parent])
    return [states[row] for row in rows.saved.tolist()]
