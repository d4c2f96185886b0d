"""What whole steps take on a span, its embedding or head included: of a hop at a client, where the ends are most of it.

Owns the timing. `cost_curve` measures single layers, for nodes.
"""

from __future__ import annotations

import itertools
import time

import torch

from swarm.types import CostCurve
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.runtime.span import Span

WIDTHS = (1, 4, 16, 64)
_SESSION = b"calibration"
_ROUNDS = 3  # of which the quickest counts: other load can only add time


@torch.inference_mode()
def step_cost(span: Span) -> CostCurve:
    """Milliseconds that a step of so many rows takes at this span. Raises OutOfMemory."""
    cache = span.new_cache(max(WIDTHS))
    cache.open(_SESSION, max(WIDTHS))
    width = span.config.rows.width(span.layers.start)
    hidden = torch.randn(max(WIDTHS), width, generator=torch.Generator().manual_seed(0))

    def ms(rows: int) -> float:
        plan = cache.schedule([StepRequest(_SESSION, 0, rows)])
        start = time.perf_counter()
        states = span.embed([0] * rows) if span.is_first else hidden[:rows].to(span.device, span.dtype)
        if len(span.layers):
            states = span.forward(states, plan, cache)
        if span.is_last:
            span.logits(states)
        took = time.perf_counter() - start
        cache.rollback(_SESSION, 0)
        return 1e3 * took

    times = [min(ms(width) for _ in range(_ROUNDS)) for width in WIDTHS]
    return CostCurve(WIDTHS, tuple(itertools.accumulate(reversed(times), min))[::-1])
