"""Clients of a chain in virtual time: the speed of a speculation setting without a machine's noise.

Owns the clients; `virtual_hops` has the hops and the clock. Schedulers, generations, speculation with its tuner, and
drafters are the real ones; only computing and sending are replaced by their times. The answers are recorded
beforehand, and the tail samples them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from virtual_hops import Job, VirtualHops

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
from swarm.planner.speculation.forecast import Strategy
from swarm.types import Chain
from swarm_client.speculation.controller import ClientSpeculation
from swarm_client.speculation.drafters.base import CachedProposal, Candidate, Drafter
from swarm_client.speculation.drafters.inline import InlineDrafter

_T = TypeVar("_T")

RESERVED_TREE_SLOTS = 192
OFF_PATH = -1  # what the tail samples after a rejected draft token; no drafter proposes it


class VirtualChain:
    """One session's client. `now`: its clock, ms; `emitted`: when tokens arrived, and how many."""

    def __init__(self, hops: VirtualHops, prompt_length: int, answer: Sequence[int]) -> None:
        self.now = 0.0
        self.emitted: list[tuple[float, int]] = []
        self._hops = hops
        self._answer, self._prompt_length = answer, prompt_length
        self._accepted: dict[int, int] = {}  # slot of a draft token that will be accepted -> tokens up to and with it
        self._client: Generator[None, StepDone, None] | None = None

    def begin(self, client: Generator[None, StepDone, None], at: float) -> None:
        """`client` is sent every result and handles it at once."""
        self._client = client
        self._hops.open(self)
        self._hops.at(at, self._wake)

    def _wake(self, at: float) -> None:
        assert self._client is not None  # begin() came first
        self.now = at
        next(self._client, None)

    def send(self, step: SendStep) -> None:
        self._hops.send(self, step, self._sampled(step), self.now)

    def drop(self, epoch: int) -> None:
        self._hops.drop(self, epoch, self.now)

    def close(self) -> None:
        self._hops.close(self, self.now)

    def on_result(self, job: Job, at: float) -> None:
        assert self._client is not None  # it sent the job
        self.now = max(self.now, at)
        result = StepDone(job.step.epoch, job.step.step, job.sampled, tuple(job.trace), job.sessions)
        with contextlib.suppress(StopIteration):
            self._client.send(result)

    def _sampled(self, step: SendStep) -> tuple[int, ...]:
        """What the tail will sample; decided at sending, because slots are reused."""
        sampled = [self._after(step.committed_after)] if step.tokens and step.sample else []
        for token, parent, slot in zip(step.rows, step.parents, step.slots, strict=True):
            above = step.committed_after if parent < 0 else self._accepted.get(parent, 0)
            if above and self._after(above) == token:
                self._accepted[slot] = above + 1
                sampled.append(self._after(above + 1))
            else:
                self._accepted.pop(slot, None)
                sampled.append(OFF_PATH)
        return tuple(sampled)

    def _after(self, length: int) -> int:
        """The token that follows the first `length` of prompt and answer."""
        place = length - self._prompt_length
        return self._answer[place] if 0 <= place < len(self._answer) else OFF_PATH


class TimedDrafter(InlineDrafter):
    """A drafter whose proposals take `cost_ms(paths)` of virtual time."""

    def __init__(self, drafter: Drafter, chain: VirtualChain, cost_ms: Callable[[int], float]) -> None:
        super().__init__(drafter)
        self._chain, self._cost_ms, self._cached_ms = chain, cost_ms, 0.2

    async def propose_many(self, paths: Sequence[Sequence[int]], width: int) -> list[list[Candidate]]:
        self._chain.now += self._cost_ms(len(paths))
        return await super().propose_many(paths, width)

    async def propose_cached(self, paths: Sequence[Sequence[int]], width: int) -> CachedProposal:
        self._chain.now += self._cached_ms
        return await super().propose_cached(paths, width)


@dataclass(frozen=True)
class Run:
    """An answer in virtual time. `tokens_per_s` over the tokens after the first, as for real answers."""

    tokens_per_s: float
    speculator: ClientSpeculation | None
    generation: GenerationState


@dataclass(frozen=True)
class SpeculationSetup:
    """How a session speculates; `drafter` None: not at all. `draft_ms`: of a request for so many paths."""

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
    """One session. `drafter` None: no speculation. The prompt is in the KV caches of the hops already."""
    hops = VirtualHops(costs, cores)
    make_drafter = (lambda: drafter) if drafter is not None else None
    chain, generation, speculator = _session(
        hops, prompt, answer, SpeculationSetup(make_drafter, only, fixed, draft_ms)
    )
    hops.run()
    _check(generation, answer)
    return Run((len(answer) - 1) * 1e3 / (chain.emitted[-1][0] - chain.emitted[0][0]), speculator, generation)


def simulate_together(
    costs: ChainCosts,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    setup: SpeculationSetup,
    *,
    apart_ms: float,
    seconds: float = 20.0,
    cores: int | None = None,
) -> float:
    """As many clients as (prompt, answer)s, each requesting its text repeatedly -> tokens/s of all together.

    They start `apart_ms` after each other; the first second is not counted.
    """
    hops, begin, end, tokens = VirtualHops(costs, cores), 1e3, (1 + seconds) * 1e3, 0

    def request(prompt: Sequence[int], answer: Sequence[int], at: float) -> None:
        def done(chain: VirtualChain) -> None:
            nonlocal tokens
            _check(generation, answer)
            tokens += sum(count for when, count in chain.emitted if begin <= when < end)
            if chain.now < end:
                request(prompt, answer, chain.now)

        _, generation, _ = _session(hops, prompt, answer, setup, at, done)

    for number, text in enumerate(texts):
        request(*text, number * apart_ms)
    hops.run()
    return tokens / seconds


def _session(
    hops: VirtualHops,
    prompt: Sequence[int],
    answer: Sequence[int],
    setup: SpeculationSetup,
    at: float = 0.0,
    done: Callable[[VirtualChain], None] = lambda chain: None,
) -> tuple[VirtualChain, GenerationState, ClientSpeculation | None]:
    chain = VirtualChain(hops, len(prompt), answer)
    generation = GenerationState(GenerationRequest(tuple(prompt), len(answer), reserved_tree_slots=RESERVED_TREE_SLOTS))
    speculator = None
    if setup.drafter is not None:
        drafter = TimedDrafter(setup.drafter(), chain, setup.draft_ms)
        costs, only, fixed = hops.costs, setup.only, setup.fixed
        speculator = ClientSpeculation(generation, drafter, lambda _: costs, only, fixed, clock=lambda: chain.now / 1e3)
    chain.begin(_drive(chain, generation, speculator, done), at)
    return chain, generation, speculator


def _check(generation: GenerationState, answer: Sequence[int]) -> None:
    if list(generation.generated) != list(answer):
        raise RuntimeError("speculation has changed the answer")


def _drive(
    chain: VirtualChain,
    generation: GenerationState,
    speculator: ClientSpeculation | None,
    done: Callable[[VirtualChain], None],
) -> Generator[None, StepDone, None]:
    """What `swarm_client.generation.generation_loop` does with a chain that never fails."""
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
                    assert speculator is not None  # without one no drafts are requested
                    pending.append(_run(speculator.draft(action)))
                case DiscardInFlight():
                    if speculator is not None:
                        speculator.on_discard()
                    chain.drop(action.epoch)
                case EmitTokens():
                    chain.emitted.append((chain.now, len(action.tokens)))
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
    raise RuntimeError("a drafter in virtual time must not wait")
