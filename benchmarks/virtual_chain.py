"""A chain of hops in virtual time under the real engine: what a setting is worth with no machine's noise in it.

Owns the clocks and the links. The hops' schedulers, the generations, the speculators with their tuners, and the
drafters are the real ones; only computing and sending are replaced by their times. The tail knows the answers
beforehand and draws them.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from swarm.config import Limits
from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.generation.state_machine import (
    Action,
    ChainReady,
    DiscardInFlight,
    EmitTokens,
    Event,
    Finish,
    GenerationRequest,
    GenerationState,
    RequestDrafts,
    SendStep,
    SpeculationPolicy,
    StepDone,
)
from swarm.planner.scheduling.batch_scheduler import BatchScheduler
from swarm.planner.scheduling.session_order import SessionOrder
from swarm.planner.speculation.forecast import Strategy
from swarm.types import Chain, LayerSpan
from swarm_client.speculation.controller import ClientSpeculation
from swarm_client.speculation.drafters.base import CachedProposal, Candidate, Drafter
from swarm_client.speculation.drafters.inline import InlineDrafter

_T = TypeVar("_T")

TREE_ROOM = 192
WHOLE = LayerSpan(0, 1)  # every hop runs all its layers for everybody
OFF_PATH = -1  # what the tail draws after a wrong guess; nobody guesses it


@dataclass(slots=True)
class _Job:
    """A step on its way; a `plan.scheduling` step at `hop`."""

    chain: VirtualChain
    step: SendStep
    draws: tuple[int, ...]  # what the tail will answer
    hop: _Hop
    entered: float = 0.0  # the hop's queue
    trace: list[tuple[float, float]] = field(default_factory=list)
    sessions: int = 1
    span = WHOLE

    @property
    def session_key(self) -> VirtualChain:
        return self.chain

    @property
    def rows(self) -> int:
        return max(1, len(self.step.tokens) + len(self.step.rows))

    @property
    def prefill(self) -> bool:
        return len(self.step.tokens) > 1

    @property
    def stale(self) -> bool:
        return self.step.epoch < self.hop.epochs.get(self.chain, 0)

    @property
    def dropped(self) -> bool:
        return self.chain not in self.hop.epochs  # the session is over


class _Hop:
    """A node: the scheduler it runs, and the epoch of every session that is open."""

    def __init__(self) -> None:
        self.scheduler: BatchScheduler[_Job] = BatchScheduler(Limits().batch_tokens)
        self.order: SessionOrder[_Job] = SessionOrder()
        self.epochs: dict[VirtualChain, int] = {}
        self.busy = False
        self.start_at: float | None = None  # when the next batch is to be taken


class VirtualHops:
    """Steps pass hop after hop; each runs a batch at a time, as the executor packs them, and drops steps of an epoch
    that it knows to be over.

    `cores`: what the hops share, each slower while more of them compute; None for a machine each.
    """

    def __init__(self, costs: ChainCosts, cores: int | None = None) -> None:
        self.costs = costs
        self._hops = [_Hop() for _ in costs.stages]
        self._cores = cores if cores is not None else len(self._hops)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()

    def run(self) -> None:
        """Until nothing is under way."""
        while self._events:
            at, _, happen = heapq.heappop(self._events)
            happen(at)

    def at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen))

    def open(self, chain: VirtualChain) -> None:
        for hop in self._hops:
            hop.epochs[chain] = 0

    def close(self, chain: VirtualChain, at: float) -> None:
        """As `drop`."""
        for hop in self._hops:
            self.at(at + self.costs.link_ms[0], partial(self._close, hop, chain))

    def send(self, chain: VirtualChain, step: SendStep, draws: tuple[int, ...], at: float) -> None:
        job = _Job(chain, step, draws, self._hops[0])
        self.at(at + self.costs.link_ms[0], partial(self._arrive, 0, job))

    def drop(self, chain: VirtualChain, epoch: int, at: float) -> None:
        """The news reaches every hop as directly as the client reaches the first."""
        for hop in self._hops:
            self.at(at + self.costs.link_ms[0], partial(self._void, hop, chain, epoch))

    def _close(self, hop: _Hop, chain: VirtualChain, _at: float) -> None:
        hop.epochs.pop(chain, None)
        hop.order.forget(chain)
        hop.scheduler.forget(chain)

    def _void(self, hop: _Hop, chain: VirtualChain, epoch: int, _at: float) -> None:
        if chain in hop.epochs:
            hop.epochs[chain] = max(hop.epochs[chain], epoch)

    def _arrive(self, number: int, job: _Job, at: float) -> None:
        job.hop = self._hops[number]
        self._void(job.hop, job.chain, job.step.epoch, at)
        if not job.stale and not job.dropped:
            self._enter(job.hop, job.hop.order.arrive(job), at)
            self._start_soon(number, at)

    def _enter(self, hop: _Hop, job: _Job | None, at: float) -> None:
        if job is not None:
            job.entered = at
            hop.scheduler.push(job)

    def _start_soon(self, number: int, at: float) -> None:
        hop = self._hops[number]
        if hop.busy or not hop.scheduler:
            return
        wait_ms = 1e3 * hop.scheduler.wait_s()
        if hop.start_at is None or not wait_ms:  # nobody has waited yet, or everybody is here
            start_at = hop.start_at = at + wait_ms
            self.at(start_at, partial(self._start, number, start_at))

    def _start(self, number: int, start_at: float, at: float) -> None:
        hop = self._hops[number]
        if start_at != hop.start_at:
            return
        hop.start_at = None
        batch = hop.scheduler.take()
        if not batch:  # dropped meanwhile
            return
        hop.busy = True
        shared = max(1.0, sum(other.busy for other in self._hops) / self._cores)
        compute = shared * self.costs.stages[number].ms(sum(job.rows for job in batch))
        for job in batch:
            job.trace.append((at - job.entered, compute))
        self.at(at + compute, partial(self._ran, number, batch, compute))

    def _ran(self, number: int, batch: list[_Job], took: float, at: float) -> None:
        hop = self._hops[number]
        hop.busy = False
        open_jobs = [job for job in batch if not job.dropped]
        sessions = hop.scheduler.completed(open_jobs, took / 1e3, at / 1e3)
        link = self.costs.link_ms[number + 1]
        last = number + 1 == len(self._hops)
        for job in open_jobs:
            job.sessions = max(job.sessions, sessions)
            self._enter(hop, hop.order.ran(job), at)
            self.at(at + link, partial(job.chain.come, job) if last else partial(self._arrive, number + 1, job))
        self._start_soon(number, at)


class VirtualChain:
    """One session's client. `now`: its clock, ms; `came`: when tokens came, and how many."""

    def __init__(self, hops: VirtualHops, prompt_length: int, answer: Sequence[int]) -> None:
        self.now = 0.0
        self.came: list[tuple[float, int]] = []
        self._hops = hops
        self._answer, self._prompt_length = answer, prompt_length
        self._true: dict[int, int] = {}  # slot -> tokens up to and with it, of the guesses that will come true
        self._client: Generator[None, StepDone, None] | None = None

    def begin(self, client: Generator[None, StepDone, None], at: float) -> None:
        """`client` is sent every result and handles it at once."""
        self._client = client
        self._hops.open(self)
        self._hops.at(at, self._wake)

    def _wake(self, at: float) -> None:
        assert self._client is not None  # it has begun
        self.now = at
        next(self._client, None)

    def send(self, step: SendStep) -> None:
        self._hops.send(self, step, self._draws(step), self.now)

    def drop(self, epoch: int) -> None:
        self._hops.drop(self, epoch, self.now)

    def close(self) -> None:
        self._hops.close(self, self.now)

    def come(self, job: _Job, at: float) -> None:
        assert self._client is not None  # it sent the job
        self.now = max(self.now, at)
        result = StepDone(job.step.epoch, job.step.step, job.draws, tuple(job.trace), job.sessions)
        with contextlib.suppress(StopIteration):
            self._client.send(result)

    def _draws(self, step: SendStep) -> tuple[int, ...]:
        """Every guess is judged when it is sent, for slots are used again."""
        draws = [self._after(step.committed_after)] if step.tokens and step.sample else []
        for token, parent, slot in zip(step.rows, step.parents, step.slots, strict=True):
            above = step.committed_after if parent < 0 else self._true.get(parent, 0)
            if above and self._after(above) == token:
                self._true[slot] = above + 1
                draws.append(self._after(above + 1))
            else:
                self._true.pop(slot, None)
                draws.append(OFF_PATH)
        return tuple(draws)

    def _after(self, length: int) -> int:
        """The token that follows the first `length` of prompt and answer."""
        place = length - self._prompt_length
        return self._answer[place] if 0 <= place < len(self._answer) else OFF_PATH


class TimedGuesser(InlineDrafter):
    """A drafter whose answers take the virtual time that `cost_ms(paths)` says."""

    def __init__(self, drafter: Drafter, chain: VirtualChain, cost_ms: Callable[[int], float]) -> None:
        super().__init__(drafter)
        self._chain, self._cost_ms, self._glance_ms = chain, cost_ms, 0.2

    async def propose_many(self, paths: Sequence[Sequence[int]], width: int) -> list[list[Candidate]]:
        self._chain.now += self._cost_ms(len(paths))
        return await super().propose_many(paths, width)

    async def propose_cached(self, paths: Sequence[Sequence[int]], width: int) -> CachedProposal:
        self._chain.now += self._glance_ms
        return await super().propose_cached(paths, width)


@dataclass(frozen=True)
class Run:
    """An answer in virtual time. `tokens_per_s` over the tokens after the first, as for real answers."""

    tokens_per_s: float
    speculator: ClientSpeculation | None
    generation: GenerationState


@dataclass(frozen=True)
class Guessing:
    """How a session guesses; `drafter` None: not at all. `draft_ms`: what a question about so many paths takes."""

    drafter: Callable[[], Drafter] | None
    only: Strategy | None = None
    fixed: SpeculationPolicy | None = None
    draft_ms: Callable[[int], float] = lambda paths: 0.0


def simulate(
    costs: ChainCosts,
    prompt: Sequence[int],
    answer: Sequence[int],
    drafter: Drafter | None,
    *,
    only: Strategy | None = None,
    fixed: SpeculationPolicy | None = None,
    draft_ms: Callable[[int], float] = lambda paths: 0.0,
    cores: int | None = None,
) -> Run:
    """One session. `drafter` None: no guesses at all. The prompt is held by the hops already."""
    hops = VirtualHops(costs, cores)
    made = (lambda: drafter) if drafter is not None else None
    chain, generation, speculator = _session(hops, prompt, answer, Guessing(made, only, fixed, draft_ms))
    hops.run()
    _check(generation, answer)
    return Run((len(answer) - 1) * 1e3 / (chain.came[-1][0] - chain.came[0][0]), speculator, generation)


def simulate_together(
    costs: ChainCosts,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    guessing: Guessing,
    *,
    apart_ms: float,
    seconds: float = 20.0,
    cores: int | None = None,
) -> float:
    """As many clients as (prompt, answer)s, each asking for its text again and again -> tokens/s of all together.

    They begin `apart_ms` after each other; the first second is not counted.
    """
    hops, begin, end, tokens = VirtualHops(costs, cores), 1e3, (1 + seconds) * 1e3, 0

    def ask(prompt: Sequence[int], answer: Sequence[int], at: float) -> None:
        def done(chain: VirtualChain) -> None:
            nonlocal tokens
            _check(generation, answer)
            tokens += sum(count for when, count in chain.came if begin <= when < end)
            if chain.now < end:
                ask(prompt, answer, chain.now)

        _, generation, _ = _session(hops, prompt, answer, guessing, at, done)

    for number, text in enumerate(texts):
        ask(*text, number * apart_ms)
    hops.run()
    return tokens / seconds


def _session(
    hops: VirtualHops,
    prompt: Sequence[int],
    answer: Sequence[int],
    guessing: Guessing,
    at: float = 0.0,
    done: Callable[[VirtualChain], None] = lambda chain: None,
) -> tuple[VirtualChain, GenerationState, ClientSpeculation | None]:
    chain = VirtualChain(hops, len(prompt), answer)
    generation = GenerationState(GenerationRequest(tuple(prompt), len(answer), reserved_tree_slots=TREE_ROOM))
    speculator = None
    if guessing.drafter is not None:
        guesser = TimedGuesser(guessing.drafter(), chain, guessing.draft_ms)
        costs, only, fixed = hops.costs, guessing.only, guessing.fixed
        speculator = ClientSpeculation(generation, guesser, lambda _: costs, only, fixed, clock=lambda: chain.now / 1e3)
    chain.begin(_drive(chain, generation, speculator, done), at)
    return chain, generation, speculator


def _check(generation: GenerationState, answer: Sequence[int]) -> None:
    if list(generation.generated) != list(answer):
        raise RuntimeError("guessing has changed the answer")


def _drive(
    chain: VirtualChain,
    generation: GenerationState,
    speculator: ClientSpeculation | None,
    done: Callable[[VirtualChain], None],
) -> Generator[None, StepDone, None]:
    """What `swarm_client.generation.generation_loop` does with a chain that never breaks."""
    if speculator is not None:
        _run(speculator.begin())
        speculator.chain_ready(Chain(()))
    pending: list[Event] = [ChainReady(len(generation.known) - 1)]
    while True:
        event = pending.pop() if pending else (yield)
        if isinstance(event, StepDone) and speculator is not None:
            speculator.on_result(event)
        actions: list[Action] = generation.handle(event)
        for action in actions:
            match action:
                case SendStep():
                    if speculator is not None:
                        speculator.sent(action)
                    chain.send(action)
                case RequestDrafts():
                    assert speculator is not None  # without one nobody guesses
                    pending.append(_run(speculator.draft(action)))
                case DiscardInFlight():
                    if speculator is not None:
                        speculator.on_discard()
                    chain.drop(action.epoch)
                case EmitTokens():
                    chain.came.append((chain.now, len(action.tokens)))
                    if speculator is not None:
                        _run(speculator.emitted(action.tokens, ()))
                case Finish():
                    chain.close()
                    done(chain)
                    return


def _run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: _T = done.value
        return result
    raise RuntimeError("a drafter of virtual time waits")
