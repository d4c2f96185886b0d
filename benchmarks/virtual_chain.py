"""A chain of hops in virtual time under the real engine: what a setting is worth with no machine's noise in it.

Owns the clock, the hops' queues and the links. The generation, the speculator with its tuner, and the drafter are the
real ones; only computing and sending are replaced by their times. The tail knows the answer beforehand and draws it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from swarm.plan.session import (
    Action,
    ChainReady,
    Draft,
    DropStale,
    EmitTokens,
    Event,
    Finish,
    Generation,
    GenerationPlan,
    Policy,
    SendStep,
    StepSettled,
)
from swarm.plan.speculation import ChainCosts, Strategy
from swarm.types import Chain
from swarm_client.drafters.base import Candidate, Drafter, Glance
from swarm_client.drafters.inline import InlineDrafter
from swarm_client.speculator import Speculator

_T = TypeVar("_T")

TREE_ROOM = 192
OFF_PATH = -1  # what the tail draws after a wrong guess; nobody guesses it


@dataclass(slots=True)
class _Job:
    """A step at one hop."""

    arrived: float
    step: SendStep
    draws: tuple[int, ...]  # what the tail will answer
    trace: list[tuple[float, float]]


class VirtualChain:
    """Steps pass hop after hop; each hop runs one at a time, and drops those of an epoch it knows to be over.

    `now`: the client's clock, ms. `cores`: what the hops share, each slower while more of them
    compute; None for a machine each.
    """

    def __init__(self, costs: ChainCosts, prompt_length: int, answer: Sequence[int], cores: int | None = None) -> None:
        self.costs, self.now = costs, 0.0
        self._answer, self._prompt_length = answer, prompt_length
        hops = len(costs.stages)
        self._epochs = [0] * hops
        self._busy = [False] * hops
        self._queues: list[deque[_Job]] = [deque() for _ in range(hops)]
        self._cores = cores if cores is not None else hops
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._results: deque[StepSettled] = deque()
        self._true: dict[int, int] = {}  # slot -> tokens up to and with it, of the guesses that will come true

    def send(self, step: SendStep) -> None:
        job = _Job(0.0, step, self._draws(step), [])
        self._at(self.now + self.costs.link_ms[0], lambda at: self._arrive(at, 0, job))

    def drop(self, epoch: int) -> None:
        """The news reaches every hop as directly as the client reaches the first."""
        for hop in range(len(self._epochs)):
            self._at(self.now + self.costs.link_ms[0], partial(self._void, hop, epoch))

    def next_result(self) -> StepSettled:
        """Lets time pass until a result is there."""
        while not self._results:
            at, _, happen = heapq.heappop(self._events)
            happen(at)
        return self._results.popleft()

    def _draws(self, step: SendStep) -> tuple[int, ...]:
        """Every guess is judged when it is sent, for slots are used again."""
        draws = [self._after(step.after)] if step.tokens and step.sample else []
        for token, parent, slot in zip(step.rows, step.parents, step.slots, strict=True):
            above = step.after if parent < 0 else self._true.get(parent, 0)
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

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen))

    def _void(self, hop: int, epoch: int, _at: float) -> None:
        self._epochs[hop] = max(self._epochs[hop], epoch)

    def _arrive(self, at: float, hop: int, job: _Job) -> None:
        job.arrived = at
        self._epochs[hop] = max(self._epochs[hop], job.step.epoch)
        self._queues[hop].append(job)
        self._start(at)

    def _start(self, at: float) -> None:
        for hop, queue in enumerate(self._queues):
            while queue and queue[0].step.epoch < self._epochs[hop]:
                queue.popleft()
            if queue and not self._busy[hop]:
                job = queue.popleft()
                self._busy[hop] = True
                shared = max(1.0, sum(self._busy) / self._cores)
                compute = shared * self.costs.stages[hop].ms(max(1, len(job.step.tokens) + len(job.step.rows)))
                job.trace.append((at - job.arrived, compute))
                self._at(at + compute, partial(self._ran, hop, job))

    def _ran(self, hop: int, job: _Job, at: float) -> None:
        self._busy[hop] = False
        link = self.costs.link_ms[hop + 1]
        if hop + 1 < len(self._queues):
            self._at(at + link, lambda when: self._arrive(when, hop + 1, job))
        else:
            self._at(at + link, partial(self._come, job))
        self._start(at)

    def _come(self, job: _Job, at: float) -> None:
        self.now = max(self.now, at)
        self._results.append(StepSettled(job.step.epoch, job.step.step, job.draws, tuple(job.trace)))


class TimedGuesser(InlineDrafter):
    """A drafter whose answers take the virtual time that `cost_ms(paths)` says."""

    def __init__(self, drafter: Drafter, chain: VirtualChain, cost_ms: Callable[[int], float]) -> None:
        super().__init__(drafter)
        self._chain, self._cost_ms, self._glance_ms = chain, cost_ms, 0.2

    async def propose_many(self, paths: Sequence[Sequence[int]], width: int) -> list[list[Candidate]]:
        self._chain.now += self._cost_ms(len(paths))
        return await super().propose_many(paths, width)

    async def glance(self, paths: Sequence[Sequence[int]], width: int) -> Glance:
        self._chain.now += self._glance_ms
        return await super().glance(paths, width)


@dataclass(frozen=True)
class Run:
    """An answer in virtual time. `tokens_per_s` over the tokens after the first, as for real answers."""

    tokens_per_s: float
    speculator: Speculator | None
    generation: Generation


def simulate(
    costs: ChainCosts,
    prompt: Sequence[int],
    answer: Sequence[int],
    drafter: Drafter | None,
    *,
    only: Strategy | None = None,
    fixed: Policy | None = None,
    draft_ms: Callable[[int], float] = lambda paths: 0.0,
    cores: int | None = None,
) -> Run:
    """`drafter` None: no guesses at all. The prompt is held by the hops already."""
    chain = VirtualChain(costs, len(prompt), answer, cores)
    generation = Generation(GenerationPlan(tuple(prompt), len(answer), tree_room=TREE_ROOM))
    speculator = None
    if drafter is not None:
        guesser = TimedGuesser(drafter, chain, draft_ms)
        speculator = Speculator(generation, guesser, lambda _: costs, only, fixed, clock=lambda: chain.now / 1e3)
        _run(speculator.begin())
        speculator.chain_ready(Chain(()))
    first = _drive(chain, generation, speculator)
    if list(generation.generated) != list(answer):
        raise RuntimeError("guessing has changed the answer")
    return Run((len(answer) - 1) * 1e3 / (chain.now - first), speculator, generation)


def _drive(chain: VirtualChain, generation: Generation, speculator: Speculator | None) -> float:
    """What `swarm_client.driver` does with a chain that never breaks. -> when the first token came."""
    first = 0.0
    pending: list[Event] = [ChainReady(len(generation.known) - 1)]
    while True:
        event = pending.pop() if pending else chain.next_result()
        if isinstance(event, StepSettled) and speculator is not None:
            speculator.settled(event)
        actions: list[Action] = generation.handle(event)
        for action in actions:
            match action:
                case SendStep():
                    if speculator is not None:
                        speculator.sent(action)
                    chain.send(action)
                case Draft():
                    assert speculator is not None  # without one nobody guesses
                    pending.append(_run(speculator.draft(action)))
                case DropStale():
                    if speculator is not None:
                        speculator.voided()
                    chain.drop(action.epoch)
                case EmitTokens():
                    first = first or chain.now
                    if speculator is not None:
                        _run(speculator.emitted(action.tokens, ()))
                case Finish():
                    return first


def _run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: _T = done.value
        return result
    raise RuntimeError("a drafter of virtual time waits")
