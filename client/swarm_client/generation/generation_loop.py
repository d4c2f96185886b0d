"""Drives one generation along chains: performs the actions of `plan.session` and reports events back to it.

Owns the repair loop (when a hop counts as lost, how long to wait for a chain). Decides no token and no route itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
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
from swarm_client.generation.session_manager import SessionManager
from swarm_client.health.stall_locator import hop_holding
from swarm_client.health.straggler_detector import StragglerDetector, StragglerSuspicion
from swarm_client.routing.blocklist import StragglerEvicted
from swarm_client.session.inference_session import HopFailed, InferenceSession
from swarm_client.speculation.controller import ClientSpeculation
from swarm_client.speculation.drafters.medusa import medusa_candidates

logger = logging.getLogger(__name__)

MAX_REPAIRS = 16
ROUTE_RETRY_S = 0.5
DETECTION_DELAY = 2.0  # silences: a hop that does not answer pings is noticed so soon; more is no loss but slowness
PREFILL_SLACK = 3.0  # times what the live costs promise of a prompt's longest piece, which a slow chain is given on top
MAX_PREFILL_SLACK = 9.0  # step timeouts, whatever a chain says of itself


@dataclass(frozen=True, slots=True)
class Waiting:
    """There is no chain now. `reason`: a sentence for people; `missing`: half-open ranges of layers nobody serves."""

    reason: str
    missing: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class GenerationLoop:
    """Iterate `run()` for EmitTokens, Waiting and one final Finish. `repairs` tells what went wrong on the way."""

    generation: GenerationState
    sessions: SessionManager
    limits: Limits
    speculator: ClientSpeculation | None = None
    chain: Chain | None = None
    cached_tokens: int = 0  # tokens that the hops had behind them when the last session was opened
    repairs: list[str] = field(default_factory=list)
    _session: InferenceSession | None = None
    _heard_at: float = 0.0  # loop time of the last result, or of the chain that is to bring one
    _outage_started: float | None = None  # loop time from which the deadline for a repair counts, see _lose
    _watch: StragglerDetector = field(default_factory=lambda: StragglerDetector(Chain(())))
    _pending: list[Event] = field(default_factory=list)
    _allowance_s: float = 0.0  # for the pieces of a prompt, see LATE

    async def run(self) -> AsyncGenerator[EmitTokens | Waiting | Finish, None]:
        """Yields tokens as they settle. Closing the generator closes the session on every hop.

        Raises NoRoute when no chain covers the model, or the last hop's own error when every chain failed.
        """
        try:
            if self.speculator is not None:
                await self.speculator.begin()
            async for notice in self._connect(self.limits.route_timeout_s):
                yield notice
            while True:
                event = self._pending.pop() if self._pending else await self._next_event()
                for action in self._handle(event):
                    match action:
                        case SendStep():
                            lost = await self._send(action)
                            if lost is not None:
                                self._pending.append(lost)
                                break
                        case RequestDrafts():
                            assert self.speculator is not None  # without one the policy asks for no guesses
                            self._pending.append(await self.speculator.draft(action))
                        case DiscardInFlight():
                            await self._discard_in_flight(action)
                        case EmitTokens():
                            if self.speculator is not None:
                                await self.speculator.emitted(action.tokens, action.medusa_candidates)
                            yield action
                        case RepairChain():
                            self._on_hop_lost(action)
                            async for notice in self._connect(self._repair_time_s(), action.committed):
                                yield notice
                        case Finish():
                            yield action
                            return
        finally:
            if self.speculator is not None:
                self.speculator.close()
            await self._close()

    def _handle(self, event: Event) -> list[Action]:
        """The generation's answer to an event; a tail that breaks the rules is lost to us."""
        if isinstance(event, StepDone) and self.speculator is not None:
            self.speculator.on_result(event)
        try:
            return self.generation.handle(event)
        except ProtocolError as error:
            assert self.chain is not None  # results come along a chain
            return self.generation.handle(HopLost(self.chain.peers[-1], str(error)))

    async def _discard_in_flight(self, action: DiscardInFlight) -> None:
        assert self._session is not None  # what is stale was sent
        if self.speculator is not None:
            self.speculator.on_discard()
        self._watch.on_discard()
        await self._session.discard_in_flight(action.epoch)

    async def _send(self, action: SendStep) -> HopLost | None:
        assert self._session is not None  # the generation sends only after ChainReady
        if self.speculator is not None:
            self.speculator.sent(action)
        if action.sample:  # pieces of a prompt wait for each other at every hop, which says nothing of the hop
            self._watch.sent(action.step, len(action.tokens) + len(action.rows), _now())
        try:
            await self._session.send(action)
        except HopFailed as failed:
            return HopLost(failed.peer, str(failed))
        return None

    async def _next_event(self) -> Event:
        session = self._session
        assert session is not None
        limit_s = self.limits.step_timeout_s + self._allowance_s
        try:
            async with asyncio.timeout(limit_s):
                result = await session.receive(
                    self._watch.probe_after_s(self.limits.ping_timeout_s), self._on_late_result
                )
        except HopFailed as failed:
            return HopLost(failed.peer, str(failed))
        except TimeoutError:
            raise ConnectionLost(
                f"no token came back within {limit_s:.0f} s along {self.chain}; one of its nodes hangs"
            ) from None
        self._heard_at, self._outage_started = _now(), None
        suspicion = self._watch.on_result(result.step, result.trace, _now(), len(self.generation.known))
        slow = await self._straggler(session, suspicion)
        if slow is not None:
            self._pending.append(HopLost(slow.peer, str(slow)))
        tokens, trace = tuple(result.tokens), tuple(result.trace)
        return StepDone(result.epoch, result.step, tokens, trace, result.active_sessions, medusa_candidates(result))

    async def _straggler(self, session: InferenceSession, suspicion: StragglerSuspicion | None) -> HopFailed | None:
        """Whom to leave: one that is suspected, if others are so much quicker that it is worth it."""
        if suspicion is None:
            return None
        worth_it = await self.sessions.should_replace(session, suspicion.peer, suspicion.slowdown)
        self._watch.assess_pending()
        if not worth_it:
            return None
        return session.mark_failed(suspicion.peer, StragglerEvicted("it has become slow, and others are much quicker"))

    async def _on_late_result(self) -> None:
        """Every hop answers pings, and yet no result comes: leave who keeps it, if others do the work much quicker, or
        if nothing moves and others do it at all.

        Raises HopFailed.
        """
        session, step = self._session, self._watch.oldest
        assert session is not None  # it is what waits
        places = await session.hop_progress()
        peer = hop_holding(session.chain.peers, places, step) if step is not None else None
        if peer is not None:
            suspicion = self._watch.outstanding(peer, places[peer].held_ms, _now(), len(self.generation.known))
            slow = await self._straggler(session, suspicion)
            if slow is not None:
                raise slow
        for peer in session.stalled_hops(places, self.limits.stall_timeout_s + self._allowance_s):
            if await self.sessions.has_alternative(session, peer):
                raise session.mark_failed(peer, StragglerEvicted("steps come to it and no further"))

    # Chains ----------------------------------------------------------------------------------------------------------

    def _on_hop_lost(self, action: RepairChain) -> None:
        """Note what was lost, and since when: silence before a loss that took silence to notice is waiting too.

        Raises ConnectionLost when it happens too often.
        """
        logger.warning("lost %s (%s); looking for another way", action.lost, action.reason)
        self.repairs.append(f"{action.lost}: {action.reason}")
        if len(self.repairs) > MAX_REPAIRS:
            raise ConnectionLost(f"gave up after {MAX_REPAIRS} broken chains; the last reason: {action.reason}")
        self._pending.clear()
        if self._outage_started is None:
            self._outage_started = max(self._heard_at, _now() - DETECTION_DELAY * self.limits.ping_timeout_s)
        if self._session is not None:
            self._session.mark_failed(action.lost, ProtocolError(action.reason))
            self.sessions.block_lost(self._session)

    def _repair_time_s(self) -> float:
        """What is left of it: repairs that fail one after the other share the one deadline."""
        assert self._outage_started is not None  # there is nothing to repair otherwise
        return max(0.0, self._outage_started + self.limits.repair_timeout_s - _now())

    async def _connect(self, timeout_s: float, settled: int = 0) -> AsyncGenerator[Waiting, None]:
        """Mend the session, or else open one on the best chain; while neither can be, wait for the swarm to change.

        Leaves the event that tells how it went in `_pending`. Raises NoRoute after `timeout_s`.
        """
        deadline = _now() + timeout_s
        cause: NetworkError | None = None
        shown: Waiting | None = None
        while True:
            try:
                async with asyncio.timeout_at(deadline if self._session is not None else None):
                    self._pending.append(await self._attempt(settled))
                return
            except HopFailed as failed:
                logger.info("node %s would not open: %s", failed.peer, failed)
                cause = failed.cause
                continue
            except TimeoutError:
                if shown is not None:
                    raise NoRoute(shown.reason, shown.missing) from cause
                raise ConnectionLost(f"no other chain answered within {timeout_s:.0f} s") from cause
            except WrongModel:
                raise
            except (NoRoute, NetworkError) as error:
                if _now() + ROUTE_RETRY_S >= deadline:
                    raise _explained(error, cause) from cause
                notice = Waiting(str(error), error.missing if isinstance(error, NoRoute) else ())
            if notice != shown:
                shown = notice
                yield notice
            await asyncio.sleep(ROUTE_RETRY_S)

    async def _attempt(self, settled: int) -> ChainReady | HopLost:
        """Raises NoRoute, and HopFailed when a hop of a new chain refused."""
        broken = self._session
        if broken is not None:
            try:
                await self.sessions.repair(broken, self.generation, settled)
                return self._ready(broken, settled)
            except HopFailed as failed:
                return HopLost(failed.peer, str(failed))
            except NoRoute as error:
                logger.info("the chain cannot be mended: %s", error)
        session = await self.sessions.open(self.generation)
        if broken is not None:
            await broken.close()
        self.cached_tokens = session.cached_tokens
        return self._ready(session, session.cached_tokens)

    def _ready(self, session: InferenceSession, held: int) -> ChainReady:
        self._session, self.chain, self._heard_at = session, session.chain, _now()
        costs = self.sessions.costs(session.chain)
        self._watch = StragglerDetector(session.chain, costs, self._watch.suspicions)
        if self.speculator is not None:
            self.speculator.chain_ready(session.chain)
        chunks = self.sessions.chunks(session.chain, len(self.generation.known) - held)
        longest = max(chunks, default=self.generation.request.prefill_chunk)
        self._allowance_s = min(
            PREFILL_SLACK * costs.iteration_ms(longest) / 1e3, MAX_PREFILL_SLACK * self.limits.step_timeout_s
        )
        return ChainReady(held, chunks)

    async def _close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await self.sessions.close(session, self.generation)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _explained(error: NoRoute | NetworkError, cause: NetworkError | None) -> Exception:
    """A swarm whose nodes all refuse says why they do; one that lacks layers says which."""
    if isinstance(cause, RemoteError):
        return cause
    if cause is None or not isinstance(error, NoRoute):
        return error
    return NoRoute(f"{error} (the last node tried: {cause})", error.missing)
