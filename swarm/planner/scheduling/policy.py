"""The numbers of the scheduling model, in one place. Limits an owner may set (`swarm.config.Limits`) are not here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """Batches: `max_prefill_skips`: how many may pass over the oldest prefill before it goes first.
    `batch_wait_ratio`: of the last decoding batch's time, the longest that a batch waits for the co-scheduled sessions
    that are still missing; `max_batch_wait_s` bounds that. `active_session_s`: a session that decoded so recently
    shares the node with the others.

    Layer time: `layer_time_decay`, `long_term_decay`: the weight of what was measured before, in what a layer costs now
    and in what is usual on this machine. `max_ratio`: how far a batch may be off the cost curve, either way, and be
    believed. `idle_fade_s`: without work, the estimate falls back to what is usual within a few of these.
    """

    max_prefill_skips: int = 4
    batch_wait_ratio: float = 1.5
    max_batch_wait_s: float = 0.02
    active_session_s: float = 1.0
    layer_time_decay: float = 0.9
    long_term_decay: float = 0.995
    max_ratio: float = 100.0
    idle_fade_s: float = 10.0


DEFAULT_POLICY = SchedulingPolicy()
