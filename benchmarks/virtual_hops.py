"""The hops of a chain in virtual time: the node's own schedulers over a clock of their own.

Owns the clock, the links and the batches; computing and sending are replaced by their times. What the sessions send,
and what they make of the results, is their business.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from swarm.config import Limits
from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.generation.state_machine import SendStep
from swarm.planner.scheduling.batch_scheduler import BatchScheduler
from swarm.planner.scheduling.fair_shares import Share
from swarm.planner.scheduling.session_order import SessionOrder
from swarm.types import LayerSpan

FULL_SPAN = LayerSpan(0, 1)  # every hop runs all its layers for every session


class Session(Hashable, Protocol):
    """The sender of steps, hashed by identity."""

    def on_result(self, job: Job, at: float) -> None:
        """The tail's result of `job` has arrived, at `at` ms."""


@dataclass(slots=True)
class Job:
    """A step in flight; what the scheduler of `hop` takes for a batch step."""

    session: Session
    step: SendStep
    sampled: tuple[int, ...]  # the tail's result
    hop: _Hop
    queued_at: float = 0.0  # ms
    trace: list[tuple[float, float]] = field(default_factory=list)  # of each hop: queue ms, compute ms
    sessions: int = 1
    span = FULL_SPAN
    context = 0  # which the costs of a chain leave out

    @property
    def share(self) -> Share:
        return Share(self.session)

    @property
    def session_key(self) -> Session:
        return self.session

    @property
    def rows(self) -> int:
        return max(1, len(self.step.tokens) + len(self.step.rows))

    @property
    def prefill(self) -> bool:
        return len(self.step.tokens) > 1

    @property
    def stale(self) -> bool:
        return self.step.epoch < self.hop.epochs.get(self.session, 0)

    @property
    def dropped(self) -> bool:
        return self.session not in self.hop.epochs  # the session is closed


class _Hop:
    """A node: the scheduler it runs, and the epoch of every session that is open."""

    def __init__(self) -> None:
        self.scheduler: BatchScheduler[Job] = BatchScheduler(Limits().batch_tokens)
        self.order: SessionOrder[Job] = SessionOrder()
        self.epochs: dict[Session, int] = {}
        self.busy = False
        self.start_at: float | None = None  # when the next batch is taken


class VirtualHops:
    """Steps pass hop after hop; each runs one batch at a time, as the executor packs them, and drops steps of
    an invalidated epoch.

    `cores`: what the hops share, each slower while more of them compute; None for a machine each.
    """

    def __init__(self, costs: ChainCosts, cores: int | None = None) -> None:
        self.costs = costs
        self._hops = [_Hop() for _ in costs.stages]
        self._cores = cores if cores is not None else len(self._hops)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()

    def run(self) -> None:
        """Until no event is left."""
        while self._events:
            at, _, callback = heapq.heappop(self._events)
            callback(at)

    def at(self, when: float, callback: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), callback))

    def open(self, session: Session) -> None:
        for hop in self._hops:
            hop.epochs[session] = 0

    def close(self, session: Session, at: float) -> None:
        """The session's end reaches every hop as `drop` does."""
        for hop in self._hops:
            self.at(at + self.costs.link_ms[0], partial(self._close, hop, session))

    def send(self, session: Session, step: SendStep, sampled: tuple[int, ...], at: float) -> None:
        job = Job(session, step, sampled, self._hops[0])
        self.at(at + self.costs.link_ms[0], partial(self._arrive, 0, job))

    def drop(self, session: Session, epoch: int, at: float) -> None:
        """Steps below `epoch` are discarded; every hop is notified over a link like the client's to the first."""
        for hop in self._hops:
            self.at(at + self.costs.link_ms[0], partial(self._discard, hop, session, epoch))

    def _close(self, hop: _Hop, session: Session, _at: float) -> None:
        hop.epochs.pop(session, None)
        hop.order.forget(session)
        hop.scheduler.forget(session)

    def _discard(self, hop: _Hop, session: Session, epoch: int, _at: float) -> None:
        if session in hop.epochs:
            hop.epochs[session] = max(hop.epochs[session], epoch)

    def _arrive(self, number: int, job: Job, at: float) -> None:
        job.hop = self._hops[number]
        self._discard(job.hop, job.session, job.step.epoch, at)
        if not job.stale and not job.dropped:
            self._enqueue(job.hop, job.hop.order.arrive(job), at)
            self._start_soon(number, at)

    def _enqueue(self, hop: _Hop, job: Job | None, at: float) -> None:
        if job is not None:
            job.queued_at = at
            hop.scheduler.push(job)

    def _start_soon(self, number: int, at: float) -> None:
        hop = self._hops[number]
        if hop.busy or not hop.scheduler:
            return
        wait_ms = 1e3 * hop.scheduler.wait_s()
        if hop.start_at is None or not wait_ms:  # no timer is set, or no session is waited for
            start_at = hop.start_at = at + wait_ms
            self.at(start_at, partial(self._start, number, start_at))

    def _start(self, number: int, start_at: float, at: float) -> None:
        hop = self._hops[number]
        if start_at != hop.start_at:
            return
        hop.start_at = None
        batch = hop.scheduler.take()
        if not batch:  # all dropped meanwhile
            return
        hop.busy = True
        shared = max(1.0, sum(other.busy for other in self._hops) / self._cores)
        compute_ms = shared * self.costs.stages[number].ms(sum(job.rows for job in batch))
        for job in batch:
            job.trace.append((at - job.queued_at, compute_ms))
        self.at(at + compute_ms, partial(self._completed, number, batch, compute_ms))

    def _completed(self, number: int, batch: list[Job], compute_ms: float, at: float) -> None:
        hop = self._hops[number]
        hop.busy = False
        hop.scheduler.settle(batch, compute_ms)
        open_jobs = [job for job in batch if not job.dropped]
        sessions = hop.scheduler.completed(open_jobs, compute_ms / 1e3, at / 1e3)
        link = self.costs.link_ms[number + 1]
        last = number + 1 == len(self._hops)
        for job in open_jobs:
            job.sessions = max(job.sessions, sessions)
            self._enqueue(hop, hop.order.ran(job), at)
            self.at(at + link, partial(job.session.on_result, job) if last else partial(self._arrive, number + 1, job))
        self._start_soon(number, at)
