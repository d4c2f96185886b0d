"""The tuning constants of cost estimates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostPolicy:
    """How costs are fitted to curves, and how fast they follow measurements."""

    chunk_tokens: int = 256  # a typical prefill chunk: hops are compared at this size
    min_chunk_rows: int = 8  # cost curves are close to a line from there on; narrower points would bend the fit
    ewma_decay: float = 0.8  # of queue, link and contention times; lower follows faster, with more noise
    fit_decay: float = 0.9  # of a hop's time over the width: longer, as it takes steps of several widths to see
    prior_weight: float = 0.3  # of the predicted curve, in steps, at each of
    prior_log_widths: tuple[float, ...] = (0.0, 3.0)  # log2 of the usual widths, 1 and 8
    contention_decay: float = 0.97  # kept at each step without overlap; slow, for overlaps are rarer
    min_ratio: float = 0.05  # measured over predicted time: bounds an extrapolated fit


POLICY = CostPolicy()
