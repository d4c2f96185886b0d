"""Continuous batching: which queued steps make the next batch, and when it should start.

Decoding goes before prefill, first come first served within each; a batch takes steps of one part `[start, end)` of the
span until its token budget is full. A prefill that was passed over too often goes first, which prevents starvation.
Pure bookkeeping without tensors, threads or clocks; times come with the calls.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from swarm.planner.scheduling.batch_wait import BatchWait
from swarm.planner.scheduling.policy import DEFAULT_POLICY, SchedulingPolicy
from swarm.types import LayerSpan


class Schedulable(Protocol):
    @property
    def session_key(self) -> Hashable: ...

    @property
    def rows(self) -> int: ...

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

    `push` a step; `take` the batch after `wait_s()`, or as soon as that is 0; `completed` when it has run.
    """

    def __init__(
        self, batch_tokens: int, policy: SchedulingPolicy = DEFAULT_POLICY, max_steps: int | None = None
    ) -> None:
        """`batch_tokens`: rows of a batch, at most; `max_steps`: steps of a batch, for engines that cannot batch."""
        self._budget = batch_tokens
        self._policy = policy
        self._max_steps = max_steps
        self._decode: deque[S] = deque()
        self._prefill: deque[S] = deque()
        self._prefill_skips = 0
        self._waiting: set[Hashable] = set()  # sessions with a step in a queue
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

    def wait_s(self) -> float:
        """How long the next batch should wait for co-scheduled sessions, from now."""
        return self._wait.seconds(self._waiting)

    def take(self) -> list[S]:
        """Remove and return the next batch; empty when nothing waits.

        The first step is taken whatever its size, as a step is never split.
        """
        self._remove_dropped()
        if self._prefill and self._prefill_skips >= self._policy.max_prefill_skips:
            order: tuple[deque[S], deque[S]] = (self._prefill, self._decode)
        else:
            order = (self._decode, self._prefill)
        batch: list[S] = []
        left = self._budget
        for queue in order:
            left = self._fill(batch, queue, left)
        skipped = bool(self._prefill) and not any(step.prefill for step in batch)
        self._prefill_skips = self._prefill_skips + 1 if skipped else 0
        self._waiting = {step.session_key for step in self}
        return batch

    def completed(self, batch: Iterable[S], took_s: float, now_s: float) -> int:
        """A batch has run, in `took_s` -> how many sessions have decoded here recently."""
        return self._wait.completed([step.session_key for step in batch if not step.prefill], took_s, now_s)

    def forget(self, session_key: Hashable) -> None:
        """This session is closed."""
        self._wait.forget(session_key)

    def _remove_dropped(self) -> None:
        for queue in (self._decode, self._prefill):
            if any(step.dropped for step in queue):
                kept = [step for step in queue if not step.dropped]
                queue.clear()
                queue.extend(kept)

    def _fill(self, batch: list[S], queue: deque[S], left: int) -> int:
        """Move steps from `queue` into `batch` in order until one does not fit; steps of other spans stay behind."""
        kept: list[S] = []
        while queue and (self._max_steps is None or len(batch) < self._max_steps):
            step = queue[0]
            if batch and step.span != batch[0].span:
                kept.append(queue.popleft())
            elif not batch or step.rows <= left:
                batch.append(queue.popleft())
                left -= step.rows
            else:
                break
        queue.extendleft(reversed(kept))
        return left
