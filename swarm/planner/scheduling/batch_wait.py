"""How long a batch waits for sessions that are co-scheduled with those it has.

Sessions that decoded in one batch leave a node together and meet again at the next one, one frame after another. If the
first frame started a batch of its own, every node would split the batch and read all weights twice. So those that are
here wait for whoever was in their last batch, and for nobody else: sessions that go through the chain behind each other
keep its nodes busy.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Set as AbstractSet

from swarm.planner.scheduling.policy import SchedulingPolicy


class BatchWait:
    """Which sessions decoded together last, and when. Sessions are keys; times are seconds of any one clock."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._last: dict[Hashable, tuple[float, int]] = {}  # session -> when, in which batch; the longest ago first
        self._members: dict[int, set[Hashable]] = {}  # of a batch, those that were in no later one
        self._batches = 0
        self._took_s = 0.0

    def seconds(self, here: AbstractSet[Hashable]) -> float:
        """To wait for, while `here` have a step waiting: 0 once everybody is here."""
        batches = {self._last[key][1] for key in here if key in self._last}
        if all(self._members[batch] <= here for batch in batches):
            return 0.0
        return min(self._policy.max_batch_wait_s, self._policy.batch_wait_ratio * self._took_s)

    def completed(self, decoded: Iterable[Hashable], took_s: float, now_s: float) -> int:
        """`decoded`: the sessions that a batch decoded for -> how many have decoded within `active_session_s`."""
        members = set(decoded)
        if members:
            for key in members:
                self.forget(key)
            self._batches += 1
            self._took_s = took_s
            self._members[self._batches] = members
            self._last |= dict.fromkeys(members, (now_s, self._batches))
        while self._last:
            oldest = next(iter(self._last))
            if now_s - self._last[oldest][0] < self._policy.active_session_s:
                break
            self.forget(oldest)
        return len(self._last)

    def forget(self, key: Hashable) -> None:
        """This session is over."""
        last = self._last.pop(key, None)
        if last is not None:
            members = self._members[last[1]]
            members.discard(key)
            if not members:
                del self._members[last[1]]
