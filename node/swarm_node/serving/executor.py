"""Runs the steps of all sessions on one device: batches them, and keeps the event loop free while they compute.

Owns when a step runs and how long it waited. Which steps share a batch, and how long a batch waits for more, is decided
by `swarm.planner.scheduling`; a step is run by the `StepEngine`, on the `ComputeDevice`.

The event loop owns all bookkeeping (sessions, KV blocks), the device's thread only tensors: `StepEngine.prepare` runs
on the loop between two batches and returns the pure computation, so neither side needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from swarm.codec import Buffer
from swarm.errors import ResourceError, SwarmError
from swarm.planner.scheduling.batch_scheduler import BatchScheduler
from swarm.planner.scheduling.layer_time import BatchStats
from swarm.types import LayerSpan, TokenLogprobs
from swarm_node.serving.session import HopSession, InboundStep

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of a step: hidden rows as raw bytes, or on the tail the sampled tokens, their Medusa candidates and
    the log-probabilities (`messages.StepResult`)."""

    body: Buffer = b""
    tokens: tuple[int, ...] = ()
    num_medusa_heads: int = 0
    medusa_ids: tuple[int, ...] = ()
    medusa_neg_logprob_centinats: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


Compute = Callable[[], Sequence[StepOutput | SwarmError]]
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
    def rows(self) -> int:
        return self.arrival.step.rows

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


_Timed = tuple[Sequence[StepOutput | SwarmError], float]  # outputs, compute ms


class ComputeDevice(Protocol):
    """Where computations run, one at a time."""

    def run(self, compute: Callable[[], T]) -> asyncio.Future[T]: ...

    def close(self) -> None:
        """Called when nothing runs."""
        ...


class ThreadDevice:
    """One thread that lives as long as the node."""

    def __init__(self, name: str = "swarm-compute") -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def run(self, compute: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, compute)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


class InlineDevice:
    """Computes in the event loop, `delay_s` after the call: deterministic, for a virtual clock."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s

    def run(self, compute: Callable[[], T]) -> asyncio.Future[T]:
        # A task is a future with the computation's own error in it; the executor awaits it before it closes.
        return asyncio.get_running_loop().create_task(self._run(compute), name="batch")

    async def _run(self, compute: Callable[[], T]) -> T:
        await asyncio.sleep(self._delay_s)
        return compute()

    def close(self) -> None:
        """Nothing to release."""


class Executor:
    """`await run(session, arrival)` from any task of the event loop; steps that wait together run together."""

    def __init__(
        self,
        engine: StepEngine,
        device: ComputeDevice,
        batch_tokens: int,
        observe: Callable[[BatchStats], None] = lambda stats: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._device = device
        self._observe = observe
        self._clock = clock
        self._scheduler: BatchScheduler[ScheduledStep] = BatchScheduler(batch_tokens)
        self._retry_singly: deque[ScheduledStep] = deque()  # steps of a batch that was refused: one of them is invalid
        self._running: asyncio.Future[_Timed] | None = None
        self._start_soon: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def waiting_rows(self) -> int:
        return self._scheduler.rows

    async def run(self, session: HopSession, arrival: InboundStep) -> StepOutcome:
        """Compute one step. Raises SwarmError. Cancelling it forgets the step, or its result if it runs already."""
        done: asyncio.Future[StepOutcome] = asyncio.get_running_loop().create_future()
        self._scheduler.push(ScheduledStep(session, arrival, done, self._clock()))
        if self._start_soon is not None and not self._scheduler.wait_s():
            self._start_soon.cancel()  # all expected steps are here
            self._start_soon = None
        self._schedule()
        return await done

    def run_exclusive(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run something else on the device, in its turn among the batches."""
        return self._device.run(work)

    def forget(self, key: int) -> None:
        """The session is over: no batch waits for it any more."""
        self._scheduler.forget(key)

    async def close(self) -> None:
        """Wait for the running batch and close the device. Waiting steps are never answered."""
        self._closed = True
        if self._running is not None:
            await asyncio.wait([self._running])
        self._device.close()

    def _schedule(self) -> None:
        """Start a batch soon, so that steps arriving together share it."""
        if self._start_soon is None and self._running is None:
            self._start_soon = asyncio.get_running_loop().call_later(self._scheduler.wait_s(), self._start)

    def _start(self) -> None:
        self._start_soon = None
        batch = self._next_batch()
        if not batch:
            return
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
        started = self._clock()
        self._running = self._device.run(partial(_timed, compute, self._clock))
        self._running.add_done_callback(partial(self._finish, batch, started))

    def _next_batch(self) -> list[ScheduledStep]:
        if self._closed:
            return []
        while self._retry_singly:
            step = self._retry_singly.popleft()
            if not step.dropped:
                return [step]
        return self._scheduler.take()

    def _finish(self, batch: list[ScheduledStep], started: float, running: asyncio.Future[_Timed]) -> None:
        self._running = None
        error = running.exception()
        if error is not None:
            if not isinstance(error, SwarmError):
                logger.error("a batch of %d steps failed", len(batch), exc_info=error)
                error = ResourceError(f"the device failed: {error}")
            _fail(batch, error)
        else:
            outputs, compute_ms = running.result()
            self._complete(batch, outputs, started, compute_ms)
        self._schedule()

    def _complete(
        self, batch: list[ScheduledStep], outputs: Sequence[StepOutput | SwarmError], started: float, compute_ms: float
    ) -> None:
        now = self._clock()
        alive = (step for step in batch if not step.session.closed)  # it may have ended while its step was computed
        sessions = max(1, self._scheduler.completed(alive, now - started, now))
        for step, output in zip(batch, outputs, strict=True):
            if isinstance(output, SwarmError):
                _fail([step], output)
            elif not step.done.done():
                step.done.set_result(StepOutcome(output, (started - step.entered) * 1e3, compute_ms, sessions))
        self._observe(BatchStats.of(batch, compute_ms))


def _timed(compute: Compute, clock: Callable[[], float]) -> _Timed:
    started = clock()
    outputs = compute()
    return outputs, (clock() - started) * 1e3


def _fail(batch: Sequence[ScheduledStep], error: SwarmError) -> None:
    for step in batch:
        if not step.done.done():
            step.done.set_exception(error)
