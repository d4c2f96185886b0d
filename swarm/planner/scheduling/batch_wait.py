"""How long a batch waits for sessions that are co-scheduled with those in its queue.

Sessions that decoded in one batch leave a node together and arrive at the next one together, one frame after another.
If the first frame started a batch of its own, every node would split the batch and read all weights twice. So queued
sessions wait for those of their last batch, and for no others: sessions that follow each other through the chain keep
its nodes busy. Nor do they wait for those of a share that is ahead of theirs, as it would have no place in the batch: a
flood of small steps that ride along would slow down whom they ride with.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from collections.abc import Set as AbstractSet

from swarm.planner.scheduling.fair_shares import Share
from swarm.planner.scheduling.policy import SchedulingPolicy


class BatchWait:
    """Which sessions decoded together last, and when. Sessions are keys; times are seconds of any one clock."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._last: dict[Hashable, tuple[float, int, Share]] = {}  # session -> when, which batch, whose; oldest first
        self._members: dict[int, set[Hashable]] = {}  # of a batch, those in no later one
        self._batches = 0
        self._took_s = 0.0

    def seconds(self, here: AbstractSet[Hashable], may_join: Callable[[Share], bool] = lambda share: True) -> float:
        """How long to wait while `here` have a step queued: 0 once all co-scheduled sessions are, but for those whose
        share has no place in the next batch."""
        batches = {self._last[key][1] for key in here if key in self._last}
        absent = {key for batch in batches for key in self._members[batch]} - here
        if not any(may_join(share) for share in {self._last[key][2] for key in absent}):
            return 0.0
        return min(self._policy.max_batch_wait_s, self._policy.batch_wait_ratio * self._took_s)

    def completed(self, decoded: Mapping[Hashable, Share], took_s: float, now_s: float) -> int:
        """`decoded`: the sessions that a batch decoded for, and whose they are -> how many have decoded within
        `active_session_s`."""
        members = set(decoded)
        if members:
            for key in members:
                self.forget(key)
            self._batches += 1
            self._took_s = took_s
            self._members[self._batches] = members
            self._last |= {key: (now_s, self._batches, share) for key, share in decoded.items()}
        while self._last:
            oldest = next(iter(self._last))
            if now_s - self._last[oldest][0] < self._policy.active_session_s:
                break
            self.forget(oldest)
        return len(self._last)

    def forget(self, key: Hashable) -> None:
        """This session is closed."""
        last = self._last.pop(key, None)
        if last is not None:
            members = self._members[last[1]]
            members.discard(key)
            if not members:
                del self._members[last[1]]
