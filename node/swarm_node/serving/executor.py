"""Runs steps of all sessions on one device: packs them into batches, keeps the event loop free while they compute.

Owns when a step runs and how long it waited. What running it means belongs to the Engine; where it runs, to the Device.

The event loop owns all bookkeeping (sessions, pages), the device's thread only tensors: `Engine.prepare` runs on the
loop between two batches and returns the pure computation, so neither side needs a lock.
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
from swarm.types import LayerSpan
from swarm_node.serving.scheduler import StepQueue
from swarm_node.serving.sessions import Arrival, Session

logger = logging.getLogger(__name__)

T = TypeVar("T")

ACTIVE_S = 1.0  # one that decoded so recently shares this node with the others
GATHER_SHARE = 1.5  # of a batch's time: the longest that its first step waits for those that were in the last one
GATHER_MAX_S = 0.02


@dataclass(frozen=True, slots=True)
class Output:
    """What a step became: hidden rows as raw bytes, or on the tail the tokens it drew, and what follows them if its
    `heads` Medusa heads are right (`messages.Result`)."""

    body: Buffer = b""
    tokens: tuple[int, ...] = ()
    heads: int = 0
    guessed: tuple[int, ...] = ()
    doubts: tuple[int, ...] = ()


Compute = Callable[[], Sequence[Output | SwarmError]]
"""A planned batch, ready to run: one Output a step, or what is wrong with that one step."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An Output and what it cost; both in milliseconds, the batch's whole computation counted for each of its steps.

    `sessions`: how many decode here at this time, this one included.
    """

    output: Output
    queue_ms: float
    compute_ms: float
    sessions: int = 1


@dataclass(frozen=True, slots=True)
class BatchStats:
    """One batch as it was measured. `queue_ms`: how long its decoding steps had waited, on average; 0 without any."""

    span: LayerSpan
    steps: int
    decode_steps: int
    rows: int
    queue_ms: float
    compute_ms: float


@dataclass(slots=True, eq=False)
class Work:
    """A session's step whose turn has come, waiting for the device."""

    session: Session
    arrival: Arrival
    done: asyncio.Future[Outcome]
    entered: float

    @property
    def rows(self) -> int:
        return self.arrival.step.rows

    @property
    def span(self) -> LayerSpan:
        return self.session.span

    @property
    def prefill(self) -> bool:
        return self.arrival.step.line > 1

    @property
    def dropped(self) -> bool:
        return self.done.done()


class Engine(Protocol):
    """The span, its cache and the sampler, as the executor sees them."""

    def prepare(self, works: Sequence[Work]) -> Compute:
        """Plan a batch of steps with equal spans, at most one of a session.

        Called on the event loop while no computation runs. Raises SwarmError before it has changed anything.
        """
        ...


_Timed = tuple[Sequence[Output | SwarmError], float]  # outputs, compute ms


class Device(Protocol):
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
    """Computes in the event loop, `delay_s` after it was asked: deterministic, for a virtual clock."""

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
        engine: Engine,
        device: Device,
        batch_tokens: int,
        observe: Callable[[BatchStats], None] = lambda stats: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._device = device
        self._observe = observe
        self._clock = clock
        self._queue: StepQueue[Work] = StepQueue(batch_tokens)
        self._alone: deque[Work] = deque()  # steps of a batch that was refused: one of them is to blame
        self._running: asyncio.Future[_Timed] | None = None
        self._start_soon: asyncio.TimerHandle | None = None
        self._closed = False
        self._decoded: dict[int, tuple[float, int]] = {}  # session key -> when it last did, in which batch
        self._batches = 0
        self._decode_s = 0.0  # what the last batch took that decoded

    @property
    def waiting_rows(self) -> int:
        return self._queue.rows

    async def run(self, session: Session, arrival: Arrival) -> Outcome:
        """Compute one step. Raises SwarmError. Cancelling it forgets the step, or its result if it runs already."""
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._queue.push(Work(session, arrival, done, self._clock()))
        if self._start_soon is not None and not self._gather_s():
            self._start_soon.cancel()  # everybody is here
            self._start_soon = None
        self._schedule()
        return await done

    def aside(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run something else on the device, in its turn among the batches."""
        return self._device.run(work)

    def forget(self, key: int) -> None:
        """This session is over: nobody waits for it, and it shares the node with nobody."""
        self._decoded.pop(key, None)

    async def close(self) -> None:
        """Wait for the batch that runs and give the device back. Steps that wait are never answered."""
        self._closed = True
        if self._running is not None:
            await asyncio.wait([self._running])
        self._device.close()

    def _schedule(self) -> None:
        """Start a batch soon, so that steps arriving together share it."""
        if self._start_soon is None and self._running is None:
            self._start_soon = asyncio.get_running_loop().call_later(self._gather_s(), self._start)

    def _gather_s(self) -> float:
        """How long to wait for company, in seconds.

        Sessions that decoded in one batch leave it together and meet again at the next hop, one frame after another.
        If the first frame started a batch of its own, every hop would split the batch and read all weights twice.
        So those that wait here wait for whoever was in their last batch, and for nobody else: sessions that go through
        the chain behind each other keep its hops busy.
        """
        here = {work.session.key for work in self._queue}
        batches = {self._decoded[key][1] for key in here if key in self._decoded}
        mates = {key for key, (_, batch) in self._decoded.items() if batch in batches}
        return 0.0 if mates <= here else min(GATHER_MAX_S, GATHER_SHARE * self._decode_s)

    def _decoding(self) -> int:
        """How many sessions have decoded lately."""
        now = self._clock()
        self._decoded = {key: (at, batch) for key, (at, batch) in self._decoded.items() if now - at < ACTIVE_S}
        return len(self._decoded)

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
                self._alone.extend(batch)
            self._schedule()
            return
        except BaseException as error:
            _fail(batch, ResourceError(f"this batch could not be planned: {error}"))  # a bug; nobody waits for ever
            self._schedule()
            raise
        started = self._clock()
        self._running = self._device.run(partial(_timed, compute, self._clock))
        self._running.add_done_callback(partial(self._finish, batch, started))

    def _next_batch(self) -> list[Work]:
        if self._closed:
            return []
        while self._alone:
            work = self._alone.popleft()
            if not work.dropped:
                return [work]
        return self._queue.take()

    def _finish(self, batch: list[Work], started: float, running: asyncio.Future[_Timed]) -> None:
        self._running = None
        error = running.exception()
        if error is not None:
            if not isinstance(error, SwarmError):
                logger.error("a batch of %d steps failed", len(batch), exc_info=error)
                error = ResourceError(f"the device failed: {error}")
            _fail(batch, error)
        else:
            outputs, compute_ms = running.result()
            self._answer(batch, outputs, started, compute_ms)
        self._schedule()

    def _answer(
        self, batch: list[Work], outputs: Sequence[Output | SwarmError], started: float, compute_ms: float
    ) -> None:
        waits = [(started - work.entered) * 1e3 for work in batch]
        decode = [wait for work, wait in zip(batch, waits, strict=True) if not work.prefill]
        if decode:
            self._batches += 1
            now = self._clock()
            self._decode_s = now - started
            decoded = (work.session for work in batch if not work.prefill)
            self._decoded.update((session.key, (now, self._batches)) for session in decoded if not session.closed)
        sessions = max(1, self._decoding())
        for work, output, queue_ms in zip(batch, outputs, waits, strict=True):
            if isinstance(output, SwarmError):
                _fail([work], output)
            elif not work.done.done():
                work.done.set_result(Outcome(output, queue_ms, compute_ms, sessions))
        rows = sum(work.rows for work in batch)
        queue_ms = sum(decode) / max(1, len(decode))
        self._observe(BatchStats(batch[0].span, len(batch), len(decode), rows, queue_ms, compute_ms))


def _timed(compute: Compute, clock: Callable[[], float]) -> _Timed:
    started = clock()
    outputs = compute()
    return outputs, (clock() - started) * 1e3


def _fail(batch: Sequence[Work], error: SwarmError) -> None:
    for work in batch:
        if not work.done.done():
            work.done.set_exception(error)
