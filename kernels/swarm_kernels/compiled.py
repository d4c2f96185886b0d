"""The ops on the compiled CPU kernels: torch tensors in, torch tensors out, pointers in between.

Twins of `reference`'s functions for the cases that `prepared` covers; `reference` does the rest.
"""

from __future__ import annotations

import ctypes

import torch

from swarm_kernels import native
from swarm_kernels.batch import BatchPlan
from swarm_kernels.cpu import binding
from swarm_kernels.prepared import Stack, prepared_plan


def attend(
    library: ctypes.CDLL,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: binding.Cache,
    plan: BatchPlan,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """See `ops.attend`."""
    queries, keys, values = _plain(q), _plain(k), _plain(v)
    out = torch.empty_like(queries)
    status = library.swarm_attend(
        queries.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        q.shape[1],
        cache,
        prepared_plan(library, plan, cache.pages),
        scale,
        sliding_window or 0,
        softcap or 0.0,
        out.data_ptr(),
    )
    native.check(status)
    return out if out.dtype is q.dtype else out.to(q.dtype)


def _plain(x: torch.Tensor) -> torch.Tensor:
    """`x` in contiguous fp32. Asked first: a conversion that changes nothing costs microseconds."""
    return x if x.dtype is torch.float32 and x.is_contiguous() else x.to(torch.float32).contiguous()


def move_slots(library: ctypes.CDLL, cache: binding.Cache, copy_from: torch.Tensor, copy_to: torch.Tensor) -> None:
    """See `ops.move_slots`."""
    source, target = copy_from.contiguous(), copy_to.contiguous()
    status = library.swarm_move_slots(cache, source.data_ptr(), target.data_ptr(), source.numel())
    native.check(status)


def rms_norm(library: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.rms_norm`; `x` fp32."""
    rows, scale = x.contiguous(), weight.to(torch.float32).contiguous()
    out = torch.empty_like(rows)
    width = rows.shape[-1]
    status = library.swarm_rms_norm(
        rows.data_ptr(), rows.numel() // width, width, scale.data_ptr(), eps, out.data_ptr()
    )
    native.check(status)
    return out


def decoder_layers(
    library: ctypes.CDLL,
    hidden: torch.Tensor,
    stack: Stack,
    cos: torch.Tensor,
    sin: torch.Tensor,
    plan: BatchPlan,
) -> torch.Tensor:
    """See `ops.decoder_layers`; `hidden` fp32."""
    out = hidden.clone(memory_format=torch.contiguous_format)
    turn_cos, turn_sin = cos.to(torch.float32).contiguous(), sin.to(torch.float32).contiguous()
    status = library.swarm_layers(
        stack.pointers,
        stack.caches,
        len(stack.layers),
        prepared_plan(library, plan, stack.pages),
        turn_cos.data_ptr(),
        turn_sin.data_ptr(),
        cos.shape[-1],
        out.data_ptr(),
    )
    native.check(status)
    return out
