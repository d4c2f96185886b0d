"""Continuous batching: which queued steps make the next batch, and when it should start.

Decoding goes before prefill, first come first served within each; a batch takes steps of one part `[start, end)` of the
span until its token budget is full. A prefill that was passed over too often goes first, which prevents starvation.
When steps of several shares wait, the batch is for those that are furthest behind (`fair_shares`), each with a bounded
part of it; steps of others ride along where that hardly makes the batch longer. A batch under way can be overtaken by
steps of a share that is further behind (`overtakes`). So while shares are active that could do so, what cannot be
interrupted is short: some layers of a batch (`layers_at_once`), of few rows (`take`), and large steps run in pieces
(`rows_at_once`; stall-free batching by chunks: Sarathi-Serve, OSDI '24). Whoever is furthest behind is not cut up.
Pure bookkeeping without tensors, threads or clocks; times come with the calls.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from swarm.planner.scheduling.batch_wait import BatchWait
from swarm.planner.scheduling.fair_batch import BatchPlan, may_join
from swarm.planner.scheduling.fair_shares import FairShares, Share
from swarm.planner.scheduling.policy import DEFAULT_POLICY, SchedulingPolicy
from swarm.planner.scheduling.work_model import WorkModel
from swarm.types import LayerSpan


class Schedulable(Protocol):
    @property
    def session_key(self) -> Hashable: ...

    @property
    def share(self) -> Share:
        """On whose account it runs."""
        ...

    @property
    def rows(self) -> int: ...

    @property
    def context(self) -> int:
        """Tokens that each of its rows attends to, about."""
        ...

    @property
    def span(self) -> LayerSpan: ...

    @property
    def prefill(self) -> bool: ...

    @property
    def dropped(self) -> bool:
        """Its result is no longer needed."""
        ...


S = TypeVar("S", bound=Schedulable)


class BatchScheduler(Generic[S]):
    """At most one step of a session is queued at a time: its next one follows after the last has run (`session_order`
    ensures that in simulations).

    `push` a step; `take` the batch after `wait_s()`, or as soon as that is 0; `settle` and `completed` when it has run.
    """

    def __init__(
        self,
        batch_tokens: int,
        policy: SchedulingPolicy = DEFAULT_POLICY,
        max_steps: int | None = None,
        work: WorkModel = WorkModel(),
    ) -> None:
        """`batch_tokens`: rows of a batch, at most; `max_steps`: steps of a batch, for engines that cannot batch."""
        self._budget = batch_tokens
        self._policy = policy
        self._max_steps = max_steps
        self._work = work
        self._decode: deque[S] = deque()
        self._prefill: deque[S] = deque()
        self._prefill_skips = 0
        self._waiting: set[Hashable] = set()  # sessions with a step in a queue
        self._shares = FairShares(policy)
        self._waiting_shares: Counter[Share] = Counter()  # steps in a queue
        self._active: dict[Share, float] = {}  # share -> when a batch of its was completed last; oldest first
        self._wait = BatchWait(policy)

    def __len__(self) -> int:
        return len(self._decode) + len(self._prefill)

    def __iter__(self) -> Iterator[S]:
        """The queued steps, decoding first."""
        return itertools.chain(self._decode, self._prefill)

    @property
    def rows(self) -> int:
        """Rows queued."""
        return sum(step.rows for step in self)

    def push(self, step: S) -> None:
        (self._prefill if step.prefill else self._decode).append(step)
        self._waiting.add(step.session_key)
        if not self._waiting_shares[step.share]:
            self._shares.join(step.share, self._credit_ms(len(step.span)))
        self._waiting_shares[step.share] += 1

    def wait_s(self) -> float:
        """How long the next batch should wait for co-scheduled sessions, from now."""
        return self._wait.seconds(self._waiting, partial(may_join, self._waiting_shares, self._shares, self._policy))

    def take(self, now_s: float = math.inf) -> list[S]:
        """Remove and return the next batch; empty when nothing waits. `now_s`: as in `completed`; without it only
        shares count as active that have a step waiting.

        The first step is taken whatever its size, as a step is never split here.
        """
        self._remove_dropped()
        if not self:
            return []
        self._furthest_behind_first()
        if self._prefill and self._prefill_skips >= self._policy.max_prefill_skips:
            order: tuple[deque[S], deque[S]] = (self._prefill, self._decode)
        else:
            order = (self._decode, self._prefill)
        plan = BatchPlan[S](self._waiting_shares, self._shares, self._work, self._policy, self._is_shared(now_s))
        batch: list[S] = []
        left = self._budget
        for riders in (False, True):
            for queue in order:
                left = self._fill(batch, queue, left, plan, riders)
            if not plan.contended:
                break
            plan.admit_riders()
        skipped = bool(self._prefill) and not any(step.prefill for step in batch)
        self._prefill_skips = self._prefill_skips + 1 if skipped else 0
        self._account(batch)
        return batch

    def overtakes(self, batch: Sequence[S], done: float) -> bool:
        """Whether a waiting step should run before the rest of `batch`, of which the part `done` has run: one whose
        share will still have got less than those of the batch when it has run. Equals do not overtake each other."""
        if any(share.first for share in self._waiting_shares):
            return not any(step.share.first for step in batch)
        running: dict[Share, float] = {}
        for step in batch:
            running[step.share] = running.get(step.share, 0.0) + self.step_ms(step)
        if not running or any(share.first for share in running):
            return False
        next_ms: dict[Share, float] = {}
        for step in self:
            next_ms[step.share] = min(self.step_ms(step), next_ms.get(step.share, math.inf))
        return any(
            all(self._behind(share, mine_ms, other, (1.0 - done) * ms) for other, ms in running.items())
            for share, mine_ms in next_ms.items()
        )

    def overtaken_after(self, batch: Sequence[S]) -> float:
        """After how many of its layers a batch is overtaken by the steps that wait now; infinite: not at all."""
        layers = len(batch[0].span)
        if not self or not self.overtakes(batch, 1.0):
            return math.inf
        return bisect_left(range(layers), True, key=lambda done: self.overtakes(batch, done / layers))

    def rows_at_once(self, share: Share, context: int, layers: tuple[int, int], now_s: float) -> int | None:
        """The most rows of a step that should run in one piece; None: all of them. `layers`: that run at once, at
        least, and in all."""
        ahead_ms = self._ahead_ms(share, 0.0, now_s, layers[1])
        if ahead_ms == math.inf:
            return None
        at_once_ms = min(max(self._policy.slice_ms, ahead_ms), self._policy.long_slice_ms * layers[0])
        return self._work.rows_within(at_once_ms / layers[0], context, self._policy)

    def layers_at_once(self, batch: Sequence[S], now_s: float) -> int:
        """How many layers of a batch should run before others are looked for, at least 1."""
        layers, ms, policy = len(batch[0].span), self.batch_ms(batch), self._policy
        charged: dict[Share, float] = {}
        for step in batch:
            charged[step.share] = charged.get(step.share, 0.0) + self.step_ms(step)
        at_once_ms = max(self._ahead_ms(share, share_ms, now_s, layers) for share, share_ms in charged.items())
        at_once_ms = max(policy.slice_ms, at_once_ms)
        at_once_ms = min(at_once_ms, policy.long_slice_ms)
        return layers if ms <= at_once_ms else max(1, int(layers * at_once_ms / ms))

    def step_ms(self, step: S) -> float:
        """What a step would take alone."""
        return self._work.layer_ms(step.rows, step.context) * len(step.span)

    def batch_ms(self, batch: Sequence[S]) -> float:
        """What a batch is expected to take."""
        rows = sum(step.rows for step in batch)
        context = sum(step.rows * step.context for step in batch) / max(1, rows)
        return self._work.layer_ms(rows, context) * len(batch[0].span) if batch else 0.0

    def settle(self, batch: Sequence[S], took_ms: float) -> None:
        """Correct what the shares of a batch were charged by what it took, in proportion to the estimates."""
        expected = [self.step_ms(step) for step in batch]
        ratio = took_ms / max(1e-9, sum(expected))
        for step, ms in zip(batch, expected, strict=True):
            self._shares.charge(step.share, (ratio - 1.0) * ms)

    def charge(self, share: Share, took_ms: float) -> None:
        """Work of `share` has run beside the batches."""
        self._shares.charge(share, took_ms)

    def completed(self, batch: Iterable[S], took_s: float, now_s: float) -> int:
        """A batch has run, in `took_s` -> how many sessions have decoded here recently."""
        steps = list(batch)
        for step in steps:
            self._active.pop(step.share, None)
            self._active[step.share] = now_s
        while self._active:
            oldest = next(iter(self._active))
            if now_s - self._active[oldest] < self._policy.active_session_s:
                break
            del self._active[oldest]
        decoded = {step.session_key: step.share for step in steps if not step.prefill}
        return self._wait.completed(decoded, took_s, now_s)

    def forget(self, session_key: Hashable) -> None:
        """This session is closed."""
        self._wait.forget(session_key)

    def _behind(self, share: Share, next_ms: float, other: Share, left_ms: float) -> bool:
        """Whether `share`, with `next_ms` more, has got less than `other`, which has yet to run `left_ms` of its
        charge."""
        if share == other:
            return False
        level = share.block == other.block  # of the two tags: blocks are compared first
        mine, theirs = self._shares.tag(share)[level], self._shares.tag(other)[level]
        return mine + next_ms / share.weight <= theirs - left_ms / other.weight

    def _others(self, share: Share, now_s: float) -> Iterator[Share]:
        """The shares besides this that have work here, or have had lately."""
        oldest = now_s - self._policy.active_session_s
        yield from (other for other in self._waiting_shares if other != share)
        yield from (other for other, at in self._active.items() if other != share and at > oldest)

    def _is_shared(self, now_s: float) -> bool:
        """Whether several shares have work here, or have had lately."""
        known = next(iter(self._waiting_shares), None)
        return known is not None and next(self._others(known, now_s), None) is not None

    def _credit_ms(self, layers: int) -> float:
        """How far a share may lag when a step of it comes: two steps of one row at least, however slow the machine."""
        return max(self._policy.share_credit_ms, 2 * self._work.layer_ms(1) * layers)

    def _ahead_ms(self, share: Share, charged_ms: float, now_s: float, layers: int) -> float:
        """How much `share`, charged for what it runs already, may use before another share could overtake it if that
        had a step of `layers` now. Not above 0: at once. Infinite: nobody could."""
        least, credit_ms = math.inf, self._credit_ms(layers)
        for other in self._others(share, now_s) if not share.first else ():
            level = share.block == other.block
            mine = self._shares.tag_on_join(share, credit_ms)[level] - charged_ms / share.weight
            theirs = self._shares.tag_on_join(other, credit_ms)[level]
            least = min(least, 0.0 if other.first else (theirs - mine) * share.weight)
        return least

    def _furthest_behind_first(self) -> None:
        if len(self._waiting_shares) > 1:
            tags = {share: (not share.first, *self._shares.tag(share)) for share in self._waiting_shares}
            for queue in (self._decode, self._prefill):
                ordered = sorted(queue, key=lambda step: tags[step.share])
                queue.clear()
                queue.extend(ordered)

    def _account(self, batch: Sequence[S]) -> None:
        """Charge for a batch and count what still waits."""
        charged = [step for step in batch if not step.share.first]
        if charged:
            self._shares.serve(min((step.share for step in charged), key=self._shares.tag))
        for step in charged:
            self._shares.charge(step.share, self.step_ms(step))
        self._waiting = {step.session_key for step in self}
        self._waiting_shares = Counter(step.share for step in self)
        self._shares.trim(self._waiting_shares)

    def _remove_dropped(self) -> None:
        for queue in (self._decode, self._prefill):
            if any(step.dropped for step in queue):
                kept = [step for step in queue if not step.dropped]
                queue.clear()
                queue.extend(kept)
        self._waiting_shares = Counter(step.share for step in self)

    def _fill(self, batch: list[S], queue: deque[S], left: int, plan: BatchPlan[S], riders: bool) -> int:
        """Move steps from `queue` into `batch` in order until one does not fit; steps of other spans, and of shares
        whose turn it is not, stay behind."""
        kept: list[S] = []
        while queue and (self._max_steps is None or len(batch) < self._max_steps):
            step = queue[0]
            if (batch and step.span != batch[0].span) or not plan.allows(step):
                kept.append(queue.popleft())
            elif not batch or step.rows <= left:
                batch.append(queue.popleft())
                plan.add(step)
                left -= step.rows
            else:
                break
        queue.extendleft(reversed(kept))
        return left
