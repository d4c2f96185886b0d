"""Short convolutions, linear recurrences and gated norms on the compiled CPU kernels: every row of a batch in one call.

Rows are computed one after the other along each path, in fp32, whatever is beside them and wherever a text is cut: on
one instruction set the results are the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from swarm.errors import KernelError
from swarm_kernels.ops.base.gated_norm import GatedNorm, check_norm
from swarm_kernels.ops.base.recurrence import (
    Convolution,
    Recurrence,
    State,
    StateRows,
    check_convolution,
    check_recurrence,
)
from swarm_kernels.ops.cpu import binding, cpu_library


def convolve(
    x: torch.Tensor, how: Convolution, rows: StateRows, starts: Sequence[State]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """See `dispatch.convolve`."""
    check_convolution(x, how, rows, starts)
    taps, channels = how.weight.shape
    wide = x.float()
    if wide.stride(1) != 1:
        wide = wide.contiguous()
    output = torch.empty(x.shape)
    saved = [torch.empty(channels, taps) for _ in range(len(rows.saved))]
    desc = binding.ConvolutionDesc(
        how.weight.data_ptr(), _pointer(how.bias), channels, taps, how.silu, x.dtype is torch.bfloat16
    )
    before = [None if state is None else _fp32(state) for state in starts]
    states = _pointers(before), _pointers(saved)
    call = cpu_library.loaded().swarm_convolve
    _check(call(_describe(rows), *states, desc, wide.data_ptr(), wide.stride(0), output.data_ptr()))
    return output.to(x.dtype), [state.to(x.dtype) for state in saved]


def recur(how: Recurrence, rows: StateRows, starts: Sequence[State]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """See `dispatch.recur`."""
    check_recurrence(how, rows, starts)
    (n, groups, keys), (_, heads, values) = how.key.shape, how.value.shape
    query, key, value = (_rows_of_heads(x) for x in (how.query, how.key, how.value))
    decay, beta, skip = (None if x is None else _fp32(x) for x in (how.decay, how.beta, how.skip))
    output = torch.empty(n, heads, values)
    shape = (heads, values, keys) if how.values_first else (heads, keys, values)
    saved = [torch.empty(shape) for _ in range(len(rows.saved))]
    desc = binding.RecurrenceDesc(
        *(_pointer(x) for x in (query, key, value, decay, beta, skip, output)),
        *(x.stride(0) for x in (query, key, value)),
        *(groups, heads, keys, values),
        how.scale,
        how.eps or 0.0,
        how.corrects,
        how.eps is not None,
        how.decay.dim() == 3,
        how.values_first,
    )
    before = [None if state is None else _fp32(state) for state in starts]
    _check(cpu_library.loaded().swarm_recur(_describe(rows), _pointers(before), _pointers(saved), desc))
    return output, saved


def _fp32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).contiguous()


def _rows_of_heads(x: torch.Tensor) -> torch.Tensor:
    """`[n, heads, size]` in fp32, the numbers of a row next to each other."""
    wide = x.to(torch.float32)
    return wide if wide.stride(2) == 1 and wide.stride(1) == wide.shape[2] else wide.contiguous()


def _describe(rows: StateRows) -> binding.StateRowsDesc:
    sizes = len(rows.order), rows.starts, len(rows.saved)
    return binding.StateRowsDesc(*sizes, *(x.data_ptr() for x in (rows.order, rows.parent, rows.saved)))


def _pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _pointers(states: Sequence[torch.Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(states))(*map(_pointer, states))


def _check(status: int) -> None:
    if status == binding.BAD_STATE_ROWS:
        raise KernelError("rows of a recurrence are out of order, or continue or save what is not there")
    cpu_library.check(status)


def norm_gated(x: torch.Tensor, gate: torch.Tensor, how: GatedNorm) -> torch.Tensor:
    """See `dispatch.norm_gated`."""
    check_norm(x, gate, how)
    wide, gates = _fp32(x), gate.to(torch.float32)
    if gates.stride(1) != 1:
        gates = gates.contiguous()
    rounds, output = how.rounds and x.dtype is torch.bfloat16, torch.empty(x.shape)
    desc = binding.GatedNormDesc(
        how.weight.data_ptr(),
        *(x.shape[1] // how.size, how.size, how.eps),
        *(len(how.weight) > how.size, how.gate_first, how.sigmoid, rounds),
    )
    call = cpu_library.loaded().swarm_norm_gated
    cpu_library.check(call(desc, wide.data_ptr(), gates.data_ptr(), gates.stride(0), len(x), output.data_ptr()))
    return output.to(x.dtype)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """See `dispatch.softplus`."""
    wide = _fp32(x)
    output = torch.empty_like(wide)
    cpu_library.loaded().swarm_softplus(wide.data_ptr(), wide.numel(), output.data_ptr())
    return output.to(x.dtype)
