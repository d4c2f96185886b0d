"""Which of the waiting steps may share the next batch: those of the shares that are furthest behind, then riders.

Owns the rule for one batch while it is filled; the order of steps is the scheduler's, the virtual times belong to
`fair_shares`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from typing import Generic, Protocol, TypeVar

from swarm.planner.scheduling.fair_shares import FairShares, Share
from swarm.planner.scheduling.policy import SchedulingPolicy
from swarm.planner.scheduling.work_model import WorkModel
from swarm.types import LayerSpan


class Work(Protocol):
    @property
    def share(self) -> Share: ...

    @property
    def rows(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def span(self) -> LayerSpan: ...


S = TypeVar("S", bound=Work)


class BatchPlan(Generic[S]):
    """Ask `allows` of a step, and `add` it if it is taken; after `admit_riders`, of those that were refused."""

    def __init__(
        self,
        waiting: Collection[Share],
        shares: FairShares,
        work: WorkModel,
        policy: SchedulingPolicy,
        shared: bool = False,
    ) -> None:
        """`waiting`: the shares with a step that waits. `shared`: others may come soon, and find a short batch."""
        self.contended = len(waiting) > 1
        self._work = work
        self._policy = policy
        self._rows = self._row_context = 0
        self._most_ms = math.inf  # of a layer, once riders are admitted
        self._longest_ms = max(policy.slice_ms, policy.batch_gain * work.layer_ms(1)) if shared else math.inf
        self._blocks: dict[Hashable, float] = {}  # virtual ms that each may still take
        self._members: dict[Share, float] = {}
        self._taken: set[Hashable] = set()  # blocks and shares with a step in the batch
        if self.contended:
            self._allot(waiting, shares)

    def _allot(self, waiting: Collection[Share], shares: FairShares) -> None:
        first = [share for share in waiting if share.first]
        if first:
            self._blocks = {share.block: math.inf for share in first}
            self._members = dict.fromkeys(first, math.inf)
            return
        window = self._policy.share_window_ms
        tags = {share: shares.tag(share) for share in waiting}
        nearest = min(block for block, _ in tags.values())
        members: dict[Hashable, float] = {}
        for share, (block, member) in tags.items():
            self._blocks[share.block] = nearest + window - block
            members[share.block] = min(members.get(share.block, math.inf), member)
        self._members = {share: members[share.block] + window - member for share, (_, member) in tags.items()}

    def allows(self, step: S) -> bool:
        if self._most_ms < math.inf:
            return self._layer_ms(step) <= self._most_ms
        if self._rows and not step.share.first and self._layer_ms(step) > self._longest_ms:
            return False
        if not self.contended:
            return True
        share, block = step.share, step.share.block
        ms = self._work.layer_ms(step.rows, step.context) * len(step.span) / share.weight
        of_block, of_member = self._blocks.get(block, -1.0), self._members.get(share, -1.0)
        return (of_block >= ms or (of_block >= 0.0 and block not in self._taken)) and (
            of_member >= ms or (of_member >= 0.0 and share not in self._taken)
        )

    def add(self, step: S) -> None:
        self._rows += step.rows
        self._row_context += step.rows * step.context
        if not self.contended or self._most_ms < math.inf:
            return
        share, block = step.share, step.share.block
        ms = self._work.layer_ms(step.rows, step.context) * len(step.span) / share.weight
        self._blocks[block] -= ms
        self._members[share] -= ms
        self._taken |= {share, block}

    def admit_riders(self) -> None:
        """From now on, allow what makes the batch hardly longer, whoever's it is."""
        self._most_ms = (1.0 + self._policy.rider_slack) * self._layer_ms(None)

    def _layer_ms(self, step: S | None) -> float:
        """Of the batch, with `step` if there is one."""
        rows, row_context = self._rows, self._row_context
        if step is not None:
            rows, row_context = rows + step.rows, row_context + step.rows * step.context
        return self._work.layer_ms(rows, row_context / max(1, rows))


def may_join(waiting: Collection[Share], shares: FairShares, policy: SchedulingPolicy, share: Share) -> bool:
    """Whether a step of `share`, if it came now, would have a place in the next batch beside those of `waiting`."""
    if not waiting:
        return True
    if any(other.first for other in waiting):
        return share.first
    tags = [(other.block, shares.tag(other)) for other in waiting]
    block, member = shares.tag(share)
    if block > min(tag[0] for _, tag in tags) + policy.share_window_ms:
        return False
    beside = [tag[1] for of, tag in tags if of == share.block]
    return not beside or member <= min(beside) + policy.share_window_ms
