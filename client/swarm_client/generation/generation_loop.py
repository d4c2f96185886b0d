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
    Draft,
    DropStale,
    EmitTokens,
    Event,
    Finish,
    Generation,
    HopLost,
    RepairChain,
    SendStep,
    StepSettled,
)
from swarm.types import Chain
from swarm_client.generation.session_manager import ChainKeeper
from swarm_client.health.stall_locator import keeper
from swarm_client.health.straggler_detector import RoundWatch, Suspicion
from swarm_client.routing.blocklist import TooSlow
from swarm_client.session.inference_session import ChainSession, HopFailed
from swarm_client.speculation.controller import Speculator
from swarm_client.speculation.drafters.medusa import hints_of

logger = logging.getLogger(__name__)

MAX_REPAIRS = 16
ROUTE_RETRY_S = 0.5
NOTICED_WITHIN = 2.0  # silences: a hop that does not answer pings is noticed so soon; more is no loss but slowness
LATE = 3.0  # times what the live costs promise of a prompt's longest piece, which a slow chain is given on top
MOST_LATE = 9.0  # step timeouts, whatever a chain says of itself


@dataclass(frozen=True, slots=True)
class Waiting:
    """There is no chain now. `reason`: a sentence for people; `missing`: half-open ranges of layers nobody serves."""

    reason: str
    missing: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Driver:
    """Iterate `run()` for EmitTokens, Waiting and one final Finish. `repairs` tells what went wrong on the way."""

    generation: Generation
    chains: ChainKeeper
    limits: Limits
    speculator: Speculator | None = None
    chain: Chain | None = None
    held: int = 0  # tokens that the hops had behind them when the last session was opened
    repairs: list[str] = field(default_factory=list)
    _session: ChainSession | None = None
    _heard_at: float = 0.0  # loop time of the last result, or of the chain that is to bring one
    _broken_since: float | None = None  # loop time from which the deadline for a repair counts, see _lose
    _watch: RoundWatch = field(default_factory=lambda: RoundWatch(Chain(())))
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
                        case Draft():
                            assert self.speculator is not None  # without one the policy asks for no guesses
                            self._pending.append(await self.speculator.draft(action))
                        case DropStale():
                            await self._drop_stale(action)
                        case EmitTokens():
                            if self.speculator is not None:
                                await self.speculator.emitted(action.tokens, action.hints)
                            yield action
                        case RepairChain():
                            self._lose(action)
                            async for notice in self._connect(self._repair_time_s(), action.settled):
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
        if isinstance(event, StepSettled) and self.speculator is not None:
            self.speculator.settled(event)
        try:
            return self.generation.handle(event)
        except ProtocolError as error:
            assert self.chain is not None  # results come along a chain
            return self.generation.handle(HopLost(self.chain.peers[-1], str(error)))

    async def _drop_stale(self, action: DropStale) -> None:
        assert self._session is not None  # what is stale was sent
        if self.speculator is not None:
            self.speculator.voided()
        self._watch.voided()
        await self._session.drop_stale(action.epoch)

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
                result = await session.receive(self._watch.patience_s(self.limits.ping_timeout_s), self._late)
        except HopFailed as failed:
            return HopLost(failed.peer, str(failed))
        except TimeoutError:
            raise ConnectionLost(
                f"no token came back within {limit_s:.0f} s along {self.chain}; one of its nodes hangs"
            ) from None
        self._heard_at, self._broken_since = _now(), None
        suspicion = self._watch.settled(result.step, result.trace, _now(), len(self.generation.known))
        slow = await self._too_slow(session, suspicion)
        if slow is not None:
            self._pending.append(HopLost(slow.peer, str(slow)))
        tokens, trace = tuple(result.tokens), tuple(result.trace)
        return StepSettled(result.epoch, result.step, tokens, trace, result.sessions, hints_of(result))

    async def _too_slow(self, session: ChainSession, suspicion: Suspicion | None) -> HopFailed | None:
        """Whom to leave: one that is suspected, if others are so much quicker that it is worth it."""
        if suspicion is None:
            return None
        worth_it = await self.chains.worth_leaving(session, suspicion.peer, suspicion.slowdown)
        self._watch.judged()
        if not worth_it:
            return None
        return session.leave(suspicion.peer, TooSlow("it has become slow, and others are much quicker"))

    async def _late(self) -> None:
        """Every hop answers pings, and yet no result comes: leave who keeps it, if others do the work much quicker, or
        if nothing moves and others do it at all.

        Raises HopFailed.
        """
        session, step = self._session, self._watch.oldest
        assert session is not None  # it is what waits
        places = await session.places()
        peer = keeper(session.chain.peers, places, step) if step is not None else None
        if peer is not None:
            suspicion = self._watch.outstanding(peer, places[peer].had_ms, _now(), len(self.generation.known))
            slow = await self._too_slow(session, suspicion)
            if slow is not None:
                raise slow
        for peer in session.suspects(places, self.limits.stall_timeout_s + self._allowance_s):
            if await self.chains.replaceable(session, peer):
                raise session.leave(peer, TooSlow("steps come to it and no further"))

    # Chains ----------------------------------------------------------------------------------------------------------

    def _lose(self, action: RepairChain) -> None:
        """Note what was lost, and since when: silence before a loss that took silence to notice is waiting too.

        Raises ConnectionLost when it happens too often.
        """
        logger.warning("lost %s (%s); looking for another way", action.lost, action.reason)
        self.repairs.append(f"{action.lost}: {action.reason}")
        if len(self.repairs) > MAX_REPAIRS:
            raise ConnectionLost(f"gave up after {MAX_REPAIRS} broken chains; the last reason: {action.reason}")
        self._pending.clear()
        if self._broken_since is None:
            self._broken_since = max(self._heard_at, _now() - NOTICED_WITHIN * self.limits.ping_timeout_s)
        if self._session is not None:
            self._session.leave(action.lost, ProtocolError(action.reason))
            self.chains.ban_lost(self._session)

    def _repair_time_s(self) -> float:
        """What is left of it: repairs that fail one after the other share the one deadline."""
        assert self._broken_since is not None  # there is nothing to repair otherwise
        return max(0.0, self._broken_since + self.limits.repair_timeout_s - _now())

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
                await self.chains.mend(broken, self.generation, settled)
                return self._ready(broken, settled)
            except HopFailed as failed:
                return HopLost(failed.peer, str(failed))
            except NoRoute as error:
                logger.info("the chain cannot be mended: %s", error)
        session = await self.chains.open(self.generation)
        if broken is not None:
            await broken.close()
        self.held = session.held
        return self._ready(session, session.held)

    def _ready(self, session: ChainSession, held: int) -> ChainReady:
        self._session, self.chain, self._heard_at = session, session.chain, _now()
        costs = self.chains.costs(session.chain)
        self._watch = RoundWatch(session.chain, costs, self._watch.suspicions)
        if self.speculator is not None:
            self.speculator.chain_ready(session.chain)
        chunks = self.chains.chunks(session.chain, len(self.generation.known) - held)
        longest = max(chunks, default=self.generation.plan.prefill_chunk)
        self._allowance_s = min(LATE * costs.round_ms(longest) / 1e3, MOST_LATE * self.limits.step_timeout_s)
        return ChainReady(held, chunks)

    async def _close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await self.chains.close(session, self.generation)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _explained(error: NoRoute | NetworkError, cause: NetworkError | None) -> Exception:
    """A swarm whose nodes all refuse says why they do; one that lacks layers says which."""
    if isinstance(cause, RemoteError):
        return cause
    if cause is None or not isinstance(error, NoRoute):
        return error
    return NoRoute(f"{error} (the last node tried: {cause})", error.missing)
