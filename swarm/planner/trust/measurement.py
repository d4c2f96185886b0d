"""How long each hop of a chain really took for a step: what the hops report, checked against what the client measured.

A trace is a claim: each hop adds its own queue and compute time, and the hops after it could change what it wrote. The
client itself measures one number, from sending a step to its result. So the times reported never count for more than
that number; and what they and the links leave unexplained is charged to the hops that have not proven themselves, or to
all alike if none has, or all have. Blame is shared, time-limited and no accusation: an honest hop beside a liar is
cleared by the next chain without it. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarm.planner.trust.policy import POLICY, TrustPolicy


def hop_times(
    reported_ms: Sequence[float],
    round_ms: float,
    links_ms: float,
    proven: Sequence[bool],
    policy: TrustPolicy = POLICY,
) -> tuple[float, ...]:
    """ms of each hop for one step. `links_ms`: what all links of the chain together were predicted to take."""
    reported = [ms if 0.0 <= ms < math.inf else 0.0 for ms in reported_ms]
    total = math.fsum(reported)
    if total > round_ms:
        return tuple(ms * round_ms / total for ms in reported)
    unexplained = round_ms - total - policy.round_slack * links_ms
    if unexplained <= policy.overdue_ms:
        return tuple(reported)
    suspects = [not one for one in proven]
    if not any(suspects):
        suspects = [True] * len(reported)
    share = unexplained / sum(suspects)
    return tuple(ms + share * suspect for ms, suspect in zip(reported, suspects, strict=True))


def overdue_hop(
    measured_ms: Sequence[float], predicted_ms: Sequence[float], policy: TrustPolicy = POLICY
) -> int | None:
    """The hop that lost the most time in a step, if it took far longer than was predicted."""
    late = [
        (ms - expected, index)
        for index, (ms, expected) in enumerate(zip(measured_ms, predicted_ms, strict=True))
        if ms > policy.slow_ratio * expected and ms - expected > policy.overdue_ms
    ]
    return max(late)[1] if late else None
