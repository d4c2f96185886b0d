"""The tuning constants of the scheduling model. Limits that an owner may set are in `swarm.config.Limits`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """Batches and the estimate of a layer's time (τ)."""

    max_prefill_skips: int = 4  # batches that may pass over the oldest prefill; more starve it, fewer delay decoding
    batch_wait_ratio: float = 1.5  # longest wait for co-scheduled sessions, in times of the last decoding batch
    max_batch_wait_s: float = 0.02  # ... and in seconds: bounds the delay by a slow batch
    active_session_s: float = 1.0  # a session that decoded so recently shares the node
    layer_time_decay: float = 0.9  # a batch; lower follows contention faster, with more noise
    long_term_decay: float = 0.995  # of the ratio to the cost curve that is typical for this machine
    max_ratio: float = 100.0  # measured over expected time, either way; clamps outliers
    idle_fade_s: float = 10.0  # time constant with which the estimate returns to the typical ratio without work
    share_credit_ms: float = 50.0  # how far a share that did not wait may lag: prompt service against longer bursts
    share_window_ms: float = 25.0  # shares so close share a batch: larger batches against strict fairness
    rider_slack: float = 0.1  # a share ahead of the others rides along if their batch takes at most this much longer
    slice_ms: float = 2.5  # what runs in one go while others are further behind: their wait against efficiency
    batch_gain: float = 2.0  # ... a layer of a batch takes this many times that of one row, if that is longer
    long_batch_ms: float = 100.0  # batches beyond it are sliced even without company, for whoever comes meanwhile
    long_slice_ms: float = 16.0  # ... in parts of this
    min_piece_rows: int = 8  # no step is cut into fewer rows: the weights are read once for all of them
    max_under_way: int = 4  # batches begun and overtaken; each holds its hidden states
    max_idle_shares: int = 1024  # remembered without a step waiting; memory


DEFAULT_POLICY = SchedulingPolicy()
