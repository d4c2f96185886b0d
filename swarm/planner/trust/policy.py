"""The numbers that tune trust: what proves a peer, how far a stranger is believed, how long a failure is remembered."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrustPolicy:
    """More caution wastes fewer answers on bad peers, and leaves good newcomers idle for longer."""

    proven_rows: float = 32.0  # that a peer must have computed for us ...
    proven_sessions: int = 1  # ... in so many sessions that ended well since its last failure
    ratio_decay: float = 0.7  # EWMA weight of earlier measurements of measured over advertised time
    slow_ratio: float = 3.0  # measured over advertised time, against that of most peers, from which on it was a lie
    max_ratio: float = 1e4  # bounds one absurd measurement
    quickest_share: float = 0.5  # of the least time ever measured: no advertisement is believed below it
    max_usual_ratio: float = 4.0  # how much longer than advertised most peers may take, for that to be normal
    overdue_ms: float = 250.0  # more than predicted that one step must take at a hop, besides slow_ratio times as long
    overdue_steps: int = 2  # ... so often in a row, before the hop counts as slow from the start
    round_slack: float = 1.5  # times a chain's links may take what was predicted, before the rest is charged to hops
    pause_ms: float = 6000.0  # what a hop that fails costs an answer: a stall is noticed so late
    typical_tokens: float = 128.0  # of an answer, over which that pause is spread
    stranger_failure: float = 0.02  # chance that a session fails at a stranger, before anything was seen
    stranger_stall_s: float = 2.0  # without progress, before a stranger counts as stalled: a black hole costs no more
    first_step_s: float = 0.5  # ... that holds the first step of a chain: a quick one's hiccup, and a black hole ...
    first_step_ratio: float = 8.0  # ... or, if longer, times what its record says; forgiven soon, as a slow hop
    slow_link_bytes_s: float = 250e3  # ... and as long as such a link takes: a home's upload, not the slowest one
    max_hasty: int = 2  # hops that one answer leaves so soon; then its own machine or network may be the slow one
    stranger_probe_s: float = 0.3  # how soon a chain with a stranger is asked for its progress, until it has answered
    prior_sessions: float = 4.0  # for how many sessions that chance counts against what was seen
    wary_after: int = 2  # strangers that disappointed, before the claims of all strangers are cut ...
    wary_quantile: float = 0.75  # ... to this quantile of all claims, if the proven are quicker: the rest looks alike
    disappointment: float = 8.0  # good strangers that make up for a bad one
    exploration: float = 0.02  # least share of answers that try a stranger where proven peers could do without
    promising: float = 1.25  # times as quick as the proven chain, by its claim: tried at once while none disappointed
    max_detour: float = 1.5  # times as slow a chain as the proven one may be to try a stranger
    max_trials: int = 1  # answers of one client at the same time that try a stranger, where a proven chain exists
    shun_s: float = 30.0  # after a failure; doubled by each further one in a row
    shun_stranger_s: float = 900.0  # ... of one that never served well and stalled or broke the protocol
    shun_cheat_s: float = 30 * 86400.0  # after a failed audit
    max_shun_s: float = 7 * 86400.0
    memory_s: float = 86400.0  # strangers met longer ago say nothing about those of today


POLICY = TrustPolicy()
