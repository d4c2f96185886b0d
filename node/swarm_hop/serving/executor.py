"""Runs the steps of all sessions on one device: batches them, and keeps the event loop free while they compute.

Owns when a step runs and how long it waited. Which steps share a batch, and how long a batch waits for more, is decided
by `swarm.planner.scheduling`; a step is run by the `StepEngine`, on the `ComputeDevice`.

The event loop owns all bookkeeping (sessions, KV blocks), the device's thread only tensors: `StepEngine.prepare` runs
on the loop between two batches and returns the pure computation, so neither side needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from swarm.codec import Buffer
from swarm.errors import ResourceError, SwarmError
from swarm.planner.scheduling.batch_scheduler import BatchScheduler
from swarm.planner.scheduling.fair_shares import Share
from swarm.planner.scheduling.layer_time import BatchStats
from swarm.planner.scheduling.policy import DEFAULT_POLICY, SchedulingPolicy
from swarm.planner.scheduling.work_model import WorkModel
from swarm.types import LayerSpan, TokenLogprobs
from swarm_hop.serving.compute_device import ComputeDevice
from swarm_hop.serving.interruptible_batch import InterruptibleBatch, Ran, SlicedCompute
from swarm_hop.serving.session import HopSession, InboundStep
from swarm_kernels.runtime.taps import StepTaps

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of a step: hidden rows as raw bytes, or on the tail the sampled tokens, their Medusa candidates and
    the log-probabilities (`messages.StepResult`). `margins`: of the claimed tokens, one for each sampled one, if there
    are any (`OpenSession.claimed`). `taps`: what the client is sent beside it."""

    body: Buffer = b""
    tokens: tuple[int, ...] = ()
    num_medusa_heads: int = 0
    medusa_ids: tuple[int, ...] = ()
    medusa_neg_logprob_centinats: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    margins: tuple[float | None, ...] = ()
    taps: StepTaps = ()


Compute = Callable[[], Sequence[StepOutput | SwarmError]] | SlicedCompute[StepOutput | SwarmError]
"""A planned batch, ready to run: one StepOutput a step, or the error of that one step."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A StepOutput and its times in milliseconds; `compute_ms` is that of the whole batch.

    `sessions`: how many decode here at this time, this one included.
    """

    output: StepOutput
    queue_ms: float
    compute_ms: float
    sessions: int = 1
    plan_ms: float = 0.0  # as `compute_ms`, of the whole batch
    handover_ms: float = 0.0


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """A session's step whose turn has come, waiting for the device."""

    session: HopSession
    arrival: InboundStep
    done: asyncio.Future[StepOutcome]
    entered: float

    @property
    def session_key(self) -> int:
        return self.session.key

    @property
    def share(self) -> Share:
        return self.session.share

    @property
    def rows(self) -> int:
        return self.arrival.step.rows

    @property
    def context(self) -> int:
        return self.arrival.step.committed_before

    @property
    def span(self) -> LayerSpan:
        return self.session.span

    @property
    def prefill(self) -> bool:
        return self.arrival.step.causal_rows > 1

    @property
    def dropped(self) -> bool:
        return self.done.done()


class StepEngine(Protocol):
    """The span, its cache and the sampler, as the executor sees them."""

    def prepare(self, steps: Sequence[ScheduledStep]) -> Compute:
        """Plan a batch of steps with equal spans, at most one of a session.

        Called on the event loop while no computation runs. Raises SwarmError before it has changed anything.
        """
        ...

    def finished(self, steps: Sequence[ScheduledStep]) -> None:
        """The batch has run, or failed. Until now blocks of its sessions must not be given to others."""
        ...

    def min_layers(self, part: LayerSpan) -> int:
        """How many layers of `part` run in one go, at least, when its batches are sliced."""
        ...


_Batch = InterruptibleBatch[ScheduledStep, StepOutput | SwarmError]
_Ran = tuple[Ran[StepOutput | SwarmError], float]  # and ms


class Executor:
    """`await run(session, arrival)` from any task of the event loop; steps that wait together run together.

    A batch of a share that is further behind may overtake the one that runs, between two of its layers. So there is a
    stack of batches under way, of which the last one runs.
    """

    def __init__(
        self,
        engine: StepEngine,
        device: ComputeDevice,
        batch_tokens: int,
        observe: Callable[[BatchStats], None] = lambda stats: None,
        clock: Callable[[], float] = time.perf_counter,
        work: WorkModel = WorkModel(),
        policy: SchedulingPolicy = DEFAULT_POLICY,
    ) -> None:
        self._engine = engine
        self._device = device
        self._observe = observe
        self._clock = clock
        self._policy = policy
        self._scheduler: BatchScheduler[ScheduledStep] = BatchScheduler(batch_tokens, policy, work=work)
        self._retry_singly: deque[ScheduledStep] = deque()  # steps of a batch that was refused: one of them is invalid
        self._under_way: list[_Batch] = []
        self._running: asyncio.Future[_Ran] | None = None
        self._start_soon: asyncio.TimerHandle | None = None
        self._gather_until: float | None = None  # when a batch that overtakes has waited enough for its sessions
        self._exclusive = 0  # calls of `run_exclusive` that wait
        self._batch_ended = asyncio.Event()
        self._closed = False

    @property
    def waiting_rows(self) -> int:
        return self._scheduler.rows

    def rows_at_once(self, session: HopSession, context: int) -> int | None:
        """The most rows that a step of this session should hand to `run` now; None: any number."""
        layers = self._engine.min_layers(session.span), len(session.span)
        return self._scheduler.rows_at_once(session.share, context, layers, self._clock())

    async def run(self, session: HopSession, arrival: InboundStep) -> StepOutcome:
        """Compute one step. Raises SwarmError. Cancelling it forgets the step, or its result if it runs already."""
        done: asyncio.Future[StepOutcome] = asyncio.get_running_loop().create_future()
        self._scheduler.push(ScheduledStep(session, arrival, done, self._clock()))
        if self._start_soon is not None and not self._scheduler.wait_s():
            self._start_soon.cancel()  # all expected steps are here
            self._start_soon = None
        if self._running is not None:
            top = self._under_way[-1]
            top.stop_at = min(top.stop_at, self._stop_at(top))
        self._schedule()
        return await done

    async def run_exclusive(self, work: Callable[[], T]) -> T:
        """Run something else on the device, in its turn among the batches and not between the slices of one."""
        self._exclusive += 1
        try:
            while any(not batch.final for batch in self._under_way):
                self._batch_ended.clear()
                await self._batch_ended.wait()
            running = self._device.run(work)
        finally:
            self._exclusive -= 1
        return await running

    async def run_beside(self, share: Share, work: Callable[[], T]) -> tuple[T, float]:
        """Run something on the device that touches neither the span nor its cache, after what runs there now, on the
        account of `share`. -> what it returns, and ms."""
        result, took_ms = await self._device.run_parts(work)
        self._scheduler.charge(share, took_ms)
        return result, took_ms

    def forget(self, key: int) -> None:
        """The session is over: no batch waits for it any more."""
        self._scheduler.forget(key)

    async def close(self) -> None:
        """Wait for what runs and close the device. Waiting steps are never answered."""
        self._closed = True
        if self._running is not None:
            await asyncio.wait([self._running])
        self._device.close()

    def _schedule(self) -> None:
        """Start a batch soon, so that steps arriving together share it; go on at once with one that is under way."""
        if self._running is not None or self._closed:
            return
        if self._under_way:
            self._start()
        elif self._start_soon is None:
            self._start_soon = asyncio.get_running_loop().call_later(self._scheduler.wait_s(), self._start)

    def _start(self) -> None:
        self._start_soon = None
        batch = self._next_batch() if not self._under_way or self._overtaken(self._under_way[-1]) else []
        if not batch:
            if self._under_way:
                self._run(self._under_way[-1])
            return
        self._gather_until = None
        started = self._clock()
        try:
            compute = self._engine.prepare(batch)
        except SwarmError as error:
            if len(batch) == 1:
                _fail(batch, error)
            else:
                self._retry_singly.extend(batch)
            self._schedule()
            return
        except BaseException as error:  # a bug: fail the steps, so that no session hangs
            _fail(batch, ResourceError(f"this batch could not be planned: {error}"))
            self._schedule()
            raise
        now = self._clock()
        self._under_way.append(_Batch(batch, compute, len(batch[0].span), now, plan_ms=(now - started) * 1e3))
        self._run(self._under_way[-1])

    def _overtaken(self, batch: _Batch) -> bool:
        """Whether waiting steps run before the next slice of `batch`."""
        if self._retry_singly:
            return True
        most = len(self._under_way) >= self._policy.max_under_way
        if self._exclusive or most or not self._scheduler.overtakes(batch.steps, batch.done_fraction):
            return False
        wait_s, now = self._scheduler.wait_s(), self._clock()
        if wait_s and self._gather_until is None:
            self._gather_until = now + wait_s
        return not wait_s or self._gather_until is None or now >= self._gather_until

    def _next_batch(self) -> list[ScheduledStep]:
        if self._closed:
            return []
        while self._retry_singly:
            step = self._retry_singly.popleft()
            if not step.dropped:
                return [step]
        return self._scheduler.take(self._clock())

    def _stop_at(self, batch: _Batch) -> float:
        """After how many of its layers others run before the rest."""
        if batch.final or self._exclusive or len(self._under_way) >= self._policy.max_under_way:
            return math.inf
        return self._scheduler.overtaken_after(batch.steps)

    def _run(self, batch: _Batch) -> None:
        """Run it, until it has ended or others overtake it."""
        if self._exclusive:
            parts = batch.begin(None)
        else:
            layers = self._scheduler.layers_at_once(batch.steps, self._clock())
            parts = batch.begin(max(layers, self._engine.min_layers(batch.steps[0].span)))
            batch.stop_at = self._stop_at(batch)
        batch.begun = self._clock()
        self._running = self._device.run_parts(parts)
        self._running.add_done_callback(partial(self._finish, batch))

    def _finish(self, batch: _Batch, running: asyncio.Future[_Ran]) -> None:
        self._running = None
        error = running.exception()
        if error is not None:
            if not isinstance(error, SwarmError):
                logger.error("a batch of %d steps failed", len(batch.steps), exc_info=error)
                error = ResourceError(f"the device failed: {error}")
            self._end(batch)
            _fail(batch.steps, error)
        else:
            ran, compute_ms = running.result()
            batch.compute_ms += compute_ms
            batch.handover_ms += max(0.0, (self._clock() - batch.begun) * 1e3 - compute_ms)
            if ran.outputs is None:
                batch.pauses += 1
            else:
                self._end(batch)
                self._complete(batch, ran.outputs)
        self._schedule()

    def _end(self, batch: _Batch) -> None:
        self._under_way.remove(batch)
        self._engine.finished(batch.steps)
        self._batch_ended.set()

    def _complete(self, batch: _Batch, outputs: Sequence[StepOutput | SwarmError]) -> None:
        now, steps = self._clock(), batch.steps
        paused_ms = (
            max(0.0, (now - batch.started) * 1e3 - batch.compute_ms - batch.handover_ms) if batch.pauses else 0.0
        )
        self._scheduler.settle(steps, batch.compute_ms)
        alive = (step for step in steps if not step.session.closed)  # it may have ended while its step was computed
        sessions = max(1, self._scheduler.completed(alive, batch.compute_ms / 1e3, now))
        for step, output in zip(steps, outputs, strict=True):
            if isinstance(output, SwarmError):
                _fail([step], output)
            elif not step.done.done():
                queue_ms = (batch.started - step.entered) * 1e3 + paused_ms
                step.done.set_result(
                    StepOutcome(output, queue_ms, batch.compute_ms, sessions, batch.plan_ms, batch.handover_ms)
                )
        self._observe(BatchStats.of(steps, batch.compute_ms))


def _fail(batch: Sequence[ScheduledStep], error: SwarmError) -> None:
    for step in batch:
        if not step.done.done():
            step.done.set_exception(error)
