"""Drives one generation along chains: performs the actions of GenerationState and reports events back to it.

Owns when a hop is given up, when the chain is repaired and how long to wait for one. It chooses no token and no
replacement. Who does what:

- a hop fails: HopLinks (session/) finds out and raises HopFailed; the loop calls `SessionManager.repair`.
- a straggler: StragglerDetector (health/) suspects a hop from measured times, `SessionManager.should_replace`
  decides whether a chain without it is worth the repair, and `_evict_straggler` here evicts it, as if it had failed.
- a stall: every hop answers pings and no step progresses; `_on_late_result` here evicts the hop that holds the step.
- a hop fails the audit of another answer: `_next_event` leaves it. What others computed from its rows is worth nothing,
  so that the chain is not repaired: a new session computes the text anew, and `spoiled_from` says since which token.
- the repair: ChainRouter chooses the replacements, InferenceSession performs it, and without one the loop opens a new
  session on another chain (`_repair_or_open`) or waits for the swarm to change (`_connect`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from swarm.config import Limits
from swarm.errors import ConnectionLost, NetworkError, NoRoute, ProtocolError, RemoteError, WrongModel
from swarm.planner.generation.state_machine import (
    Action,
    ChainReady,
    DiscardInFlight,
    EmitTokens,
    Event,
    Finish,
    GenerationState,
    HopLost,
    RepairChain,
    RequestDrafts,
    SendStep,
    StepDone,
)
from swarm.types import Chain
from swarm_client.auditing.result import AuditResult
from swarm_client.generation.answer_grammar import AnswerGrammar
from swarm_client.generation.session_manager import SessionManager
from swarm_client.generation.session_turns import SessionTurns
from swarm_client.health.stall_locator import hop_holding
from swarm_client.health.straggler_detector import StragglerDetector, StragglerSuspicion
from swarm_client.session.hop_links import HopFailed
from swarm_client.session.inference_session import InferenceSession
from swarm_client.speculation.controller import ClientSpeculation
from swarm_client.speculation.drafters.medusa import medusa_candidates
from swarm_client.trust.chain_watch import ChainWatch
from swarm_client.trust.failures import AuditFailed, StragglerEvicted

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RepairPolicy:
    """How long a generation holds on to a failing swarm before it fails itself."""

    max_repairs: int = 32  # of one generation; a fresh client among many hostile nodes needs half of them
    route_retry_s: float = 0.5  # between two looks for a chain while there is none
    detection_delay: float = 2.0  # ping timeouts within which a dead hop is noticed: waiting that belongs to the outage
    prefill_slack: float = 3.0  # times the predicted time of the longest prefill chunk, added to the step timeout
    max_prefill_slack: float = 9.0  # step timeouts, the most that is added for a chain whose records claim to be slow


@dataclass(frozen=True, slots=True)
class Waiting:
    """There is no chain now. `reason`: a sentence for people; `missing`: half-open ranges of unserved layers."""

    reason: str
    missing: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class GenerationLoop:
    """Iterate `run()` for EmitTokens, Waiting and one final Finish. `repairs`: the failures on the way."""

    generation: GenerationState
    sessions: SessionManager
    limits: Limits
    turns: SessionTurns
    speculation: ClientSpeculation | None = None
    grammar: AnswerGrammar | None = None
    policy: RepairPolicy = RepairPolicy()
    chain: Chain | None = None
    cached_tokens: int = 0  # tokens that the hops had in their prefix caches when the last session was opened
    repairs: list[str] = field(default_factory=list)
    audit: asyncio.Task[AuditResult] | None = None  # of the answer, once it is complete
    spoiled_from: int | None = None  # the first token of the answer that came from a chain with a hop that lied
    _chain_since: tuple[float, int] = (0.0, 0)  # loop time, and how many tokens the answer had, when it was opened
    _session: InferenceSession | None = None
    _last_result_at: float = 0.0  # loop time of the last result, or since when the chain is ready
    _outage_started: float | None = None  # loop time from which the repair timeout counts, see _on_hop_lost
    _stragglers: StragglerDetector = field(default_factory=lambda: StragglerDetector(Chain(())))
    _watch: ChainWatch | None = None  # of the chain in use
    _pending: list[Event] = field(default_factory=list)
    _prefill_slack_s: float = 0.0  # added to the timeouts of steps, see RepairPolicy.prefill_slack

    async def run(self) -> AsyncGenerator[EmitTokens | Waiting | Finish, None]:
        """Yields tokens as they are committed. Closing the generator closes the session on every hop.

        Raises InvalidRequest for a bad grammar, NoRoute when no chain covers the model, NodeBusy when the client's
        other generations do not end, or the last hop's own error when every chain failed.
        """
        if self.turns.is_over:
            yield Waiting(f"{self.turns.most} answers of this client are being written; this one waits for its turn")
        async with self.turns.turn(), aclosing(self._run()) as actions:
            async for action in actions:
                yield action

    async def _run(self) -> AsyncGenerator[EmitTokens | Waiting | Finish, None]:
        try:
            if self.grammar is not None:
                await self.grammar.begin()
            if self.speculation is not None:
                await self.speculation.begin()
            async for notice in self._connect(self.limits.route_timeout_s):
                yield notice
            while True:
                event = self._pending.pop() if self._pending else await self._next_event()
                for action in await self._handle(event):
                    match action:
                        case SendStep():
                            lost = await self._send(action)
                            if lost is not None:
                                self._pending.append(lost)
                                break
                        case RequestDrafts():
                            assert self.speculation is not None  # without it the policy requests no drafts
                            self._pending.append(await self.speculation.draft(action))
                        case DiscardInFlight():
                            await self._discard_in_flight(action)
                        case EmitTokens():
                            if self.speculation is not None:
                                await self._tell_drafter(action, self.speculation)
                            yield action
                        case RepairChain():
                            if self.grammar is not None:
                                await self.grammar.check(self.generation.generated)
                            self._on_hop_lost(action)
                            async for notice in self._connect(self._repair_time_s(), action.committed):
                                yield notice
                        case Finish():
                            yield action
                            return
        finally:
            if self.speculation is not None:
                self.speculation.close()
            await self._close()

    async def _handle(self, event: Event) -> list[Action]:
        """The generation's actions for an event; a tail that violates the protocol or the grammar counts as lost."""
        if isinstance(event, StepDone) and self.speculation is not None:
            self.speculation.on_result(event)
        try:
            if isinstance(event, StepDone) and self.grammar is not None:
                await self._check_grammar(event, self.grammar)
            return self.generation.handle(event)
        except ProtocolError as error:
            assert self.chain is not None  # results come along a chain
            return self.generation.handle(HopLost(self.chain.peers[-1], str(error)))

    async def _check_grammar(self, result: StepDone, grammar: AnswerGrammar) -> None:
        """Raises ProtocolError."""
        if not await grammar.permits(self.generation.generated, self.generation.preview(result)):
            raise ProtocolError("the tail sampled a token that the request's grammar forbids")

    async def _discard_in_flight(self, action: DiscardInFlight) -> None:
        assert self._session is not None  # steps in flight were sent along it
        if self.speculation is not None:
            self.speculation.on_discard()
        self._stragglers.on_discard()
        if self._watch is not None:
            self._watch.on_discard()
        await self._session.discard_in_flight(action.epoch)

    async def _send(self, action: SendStep) -> HopLost | None:
        assert self._session is not None  # the generation sends only after ChainReady
        if self.speculation is not None:
            self.speculation.sent(action)
        if action.sample:  # prefill chunks queue behind each other at every hop, which is no sign of a straggler
            self._stragglers.sent(action.step, len(action.tokens) + len(action.rows), _now())
            if self._watch is not None:
                self._watch.sent(action.step, len(action.tokens) + len(action.rows), _now())
        try:
            await self._session.send(action)
        except HopFailed as failed:
            return HopLost(failed.peer, str(failed))
        return None

    async def _tell_drafter(self, emitted: EmitTokens, speculation: ClientSpeculation) -> None:
        """With hidden states of the text up to the last token, which has not been through the layers."""
        session, known = self._session, len(self.generation.known)
        assert session is not None  # tokens come along it
        taps = session.drafts.taps.take(emitted.samples, known - len(emitted.tokens) - 1)
        await speculation.emitted(emitted.tokens, emitted.medusa_candidates, taps, session.drafts.take_draft(known))
        if speculation.refuses_tail_drafts():
            await session.end_tail_drafts()

    async def _next_event(self) -> Event:
        session = self._session
        assert session is not None
        liar = self.sessions.convicted(session, self._chain_since[0])
        if liar is not None:
            return self._spoiled(liar)
        assert self._watch is not None  # a chain is ready
        limit_s = self.limits.step_timeout_s + self._prefill_slack_s
        probe_after_s = self._watch.probe_after_s(self._stragglers.probe_after_s(self.limits.ping_timeout_s))
        try:
            async with asyncio.timeout(limit_s):
                result = await session.receive(probe_after_s, self._on_late_result)
        except HopFailed as failed:
            return HopLost(failed.peer, str(failed))
        except TimeoutError:
            raise ConnectionLost(
                f"no token came back within {limit_s:.0f} s along {self.chain}; one of its nodes hangs"
            ) from None
        self._last_result_at, self._outage_started = _now(), None
        suspicion = self._stragglers.on_result(result.step, result.trace, _now(), len(self.generation.known))
        slow_from_start = self.sessions.observe(self._watch, result, _now())
        slow = await self._evict_straggler(session, suspicion or slow_from_start)
        if slow is not None:
            self._pending.append(HopLost(slow.peer, str(slow)))
        return StepDone(
            result.epoch,
            result.step,
            tuple(result.tokens),
            tuple(result.trace),
            result.active_sessions,
            medusa_candidates(result),
            tuple(result.logprobs),
            tuple(result.prompt_logprobs),
        )

    def _spoiled(self, liar: HopFailed) -> HopLost:
        came = len(self.generation.generated) - self._chain_since[1]
        if came and self.spoiled_from is None:
            self.spoiled_from = self._chain_since[1]
        return HopLost(liar.peer, f"{liar.cause}; {came} tokens of this answer came by way of it")

    async def _evict_straggler(
        self, session: InferenceSession, suspicion: StragglerSuspicion | None
    ) -> HopFailed | None:
        """Mark the suspected hop as failed if a chain without it is worth the repair. -> that failure."""
        if suspicion is None:
            return None
        worth_it = await self.sessions.should_replace(session, suspicion.peer, suspicion.slowdown)
        self._stragglers.on_assessed()
        if not worth_it:
            return None
        return session.mark_failed(suspicion.peer, StragglerEvicted("it has become slow, and others are much quicker"))

    async def _on_late_result(self) -> None:
        """Every hop answers pings, and yet no result comes: evict the hop that holds the step, if others are much
        quicker, or if it has stalled and there are others at all.

        Raises HopFailed.
        """
        session, step = self._session, self._stragglers.oldest
        assert session is not None  # it is what waits
        progress = await session.hop_progress()
        peer = hop_holding(session.chain.peers, progress, step) if step is not None else None
        if peer is not None:
            suspicion = self._stragglers.outstanding(peer, progress[peer].held_ms, _now(), len(self.generation.known))
            slow = await self._evict_straggler(session, suspicion)
            if slow is not None:
                raise slow
        assert self._watch is not None  # a chain is ready
        suspects, lasted_s = session.stalled_hops(progress)
        usual_s, slack_s = self.limits.stall_timeout_s, self._prefill_slack_s
        for peer in suspects:
            why = self._watch.stalled(
                peer, lasted_s, usual_s, slack_s=slack_s, on_edge=len(suspects) > 1, left=len(self.repairs)
            )
            if why is not None and await self.sessions.has_alternative(session, peer):
                raise session.mark_failed(peer, why)

    # Chains ----------------------------------------------------------------------------------------------------------

    def _on_hop_lost(self, action: RepairChain) -> None:
        """Record the failure and since when there is an outage, which includes the time that it took to detect.

        Raises ConnectionLost after too many repairs.
        """
        logger.warning("lost %s (%s); repairing the chain", action.lost, action.reason)
        self.repairs.append(f"{action.lost}: {action.reason}")
        most = self.policy.max_repairs
        if len(self.repairs) > most:
            raise ConnectionLost(f"gave up after {most} broken chains; the last reason: {action.reason}")
        self._pending.clear()
        if self._outage_started is None:
            detection_s = self.policy.detection_delay * self.limits.ping_timeout_s
            self._outage_started = max(self._last_result_at, _now() - detection_s)
        if self._session is not None:
            self._session.mark_failed(action.lost, ProtocolError(action.reason))
            self.sessions.block_failed(self._session)
            self._done_with_chain(self._session)

    def _repair_time_s(self) -> float:
        """What is left of the repair timeout, which failing repairs share."""
        assert self._outage_started is not None  # there is nothing to repair otherwise
        return max(0.0, self._outage_started + self.limits.repair_timeout_s - _now())

    async def _connect(self, timeout_s: float, committed: int = 0) -> AsyncGenerator[Waiting, None]:
        """Repair the session, or else open one on the best chain; while neither is possible, retry.

        Leaves the resulting event in `_pending`. Raises NoRoute after `timeout_s`.
        """
        deadline = _now() + timeout_s
        cause: NetworkError | None = None
        shown: Waiting | None = None
        while True:
            try:
                async with asyncio.timeout_at(deadline if self._session is not None else None):
                    self._pending.append(await self._repair_or_open(committed))
                return
            except HopFailed as failed:
                logger.info("node %s did not open the session: %s", failed.peer, failed)
                cause = failed.cause
                continue
            except TimeoutError:
                if shown is not None:
                    raise NoRoute(shown.reason, shown.missing) from cause
                raise ConnectionLost(f"no other chain answered within {timeout_s:.0f} s") from cause
            except WrongModel:
                raise
            except (NoRoute, NetworkError) as error:
                if _now() + self.policy.route_retry_s >= deadline:
                    raise _explained(error, cause) from cause
                notice = Waiting(str(error), error.missing if isinstance(error, NoRoute) else ())
            if notice != shown:
                shown = notice
                yield notice
            await asyncio.sleep(self.policy.route_retry_s)

    async def _repair_or_open(self, committed: int) -> ChainReady | HopLost:
        """Raises NoRoute, and HopFailed when a hop of a new chain refused."""
        broken = self._session
        lied = broken is not None and any(isinstance(why, AuditFailed) for why in broken.failed_hops.values())
        if broken is not None and not lied:
            try:
                await self.sessions.repair(broken, self.generation, committed)
                return self._ready(broken, committed)
            except HopFailed as failed:
                return HopLost(failed.peer, str(failed))
            except NoRoute as error:
                logger.info("the chain cannot be repaired: %s", error)
        session = await self.sessions.open(self.generation)
        if broken is not None:
            await broken.close()
        self.cached_tokens = session.cached_tokens
        self._chain_since = _now(), len(self.generation.generated)
        return self._ready(session, session.cached_tokens)

    def _ready(self, session: InferenceSession, held: int) -> ChainReady:
        self._session, self.chain, self._last_result_at = session, session.chain, _now()
        self._watch = self.sessions.watch(session)
        costs = self.sessions.costs(session.chain)
        self._stragglers = StragglerDetector(session.chain, costs, self._stragglers.suspicions)
        if self.speculation is not None:
            self.speculation.chain_ready(session.chain)
        chunks = self.sessions.chunks(session.chain, len(self.generation.known) - held)
        self._watch.widest = max(chunks, default=self.generation.request.prefill_chunk)
        longest_s = costs.iteration_ms(self._watch.widest) / 1e3
        most_s = self.policy.max_prefill_slack * self.limits.step_timeout_s
        self._prefill_slack_s = min(self.policy.prefill_slack * longest_s, most_s)
        return ChainReady(held, chunks)

    def _done_with_chain(self, session: InferenceSession) -> None:
        """While it is known which of its hops failed: a repair forgets it."""
        if self._watch is not None:
            self.sessions.done_with(self._watch, session)
            self._watch = None

    async def _close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            self._done_with_chain(session)
            self.audit = await self.sessions.close(session, self.generation)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _explained(error: NoRoute | NetworkError, cause: NetworkError | None) -> Exception:
    """The nodes' own reason where all refuse, and the missing layers where there are some."""
    if isinstance(cause, RemoteError):
        return cause
    if cause is None or not isinstance(error, NoRoute):
        return error
    return NoRoute(f"{error} (the last node tried: {cause})", error.missing)
