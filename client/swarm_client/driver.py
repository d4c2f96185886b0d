"""Drives one generation along chains: performs the actions of `plan.session` and reports events back to it.

Owns the repair loop (which peers to leave out, how long to wait for a chain). Decides no token and no route itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

from swarm.config import Limits
from swarm.errors import ConnectionLost, NetworkError, NoRoute, ProtocolError, RemoteError
from swarm.plan.session import (
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
from swarm.types import Chain, PeerId
from swarm_client.chain_session import ChainSession, HopFailed
from swarm_client.speculator import Speculator

logger = logging.getLogger(__name__)

OpenChain = Callable[[frozenset[PeerId], tuple[int, ...]], Awaitable[ChainSession]]
"""(peers to leave out, tokens so far) -> a session open on the best chain. Raises NoRoute and HopFailed."""

MAX_REPAIRS = 16
ROUTE_RETRY_S = 0.5


@dataclass(slots=True)
class Driver:
    """Iterate `run()` for EmitTokens and one final Finish. `repairs` tells what went wrong on the way."""

    generation: Generation
    open_chain: OpenChain
    limits: Limits
    speculator: Speculator | None = None
    chain: Chain | None = None
    repairs: list[str] = field(default_factory=list)
    _banned: set[PeerId] = field(default_factory=set)
    _session: ChainSession | None = None

    async def run(self) -> AsyncGenerator[EmitTokens | Finish, None]:
        """Yields tokens as they settle. Closing the generator closes the session on every hop.

        Raises NoRoute when no chain covers the model, or the last hop's own error when every chain failed.
        """
        try:
            if self.speculator is not None:
                await self.speculator.begin()
            pending: list[Event] = [await self._connect()]
            while True:
                event = pending.pop() if pending else await self._next_event()
                for action in self._handle(event):
                    match action:
                        case SendStep():
                            lost = await self._send(action)
                            if lost is not None:
                                pending.append(lost)
                                break
                        case Draft():
                            assert self.speculator is not None  # without one the policy asks for no guesses
                            pending.append(await self.speculator.draft(action))
                        case DropStale():
                            await self._drop_stale(action)
                        case EmitTokens():
                            if self.speculator is not None:
                                await self.speculator.emitted(action.tokens)
                            yield action
                        case RepairChain():
                            pending.append(await self._repair(action))
                        case Finish():
                            yield action
                            return
        finally:
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
        await self._session.drop_stale(action.epoch)

    async def _send(self, action: SendStep) -> HopLost | None:
        assert self._session is not None  # the generation sends only after ChainReady
        if self.speculator is not None:
            self.speculator.sent(action)
        try:
            await self._session.send(action)
        except HopFailed as failed:
            return HopLost(failed.peer, str(failed))
        return None

    async def _next_event(self) -> Event:
        assert self._session is not None
        try:
            async with asyncio.timeout(self.limits.step_timeout_s):
                result = await self._session.receive()
        except HopFailed as failed:
            return HopLost(failed.peer, str(failed))
        except TimeoutError:
            raise ConnectionLost(
                f"no token came back within {self.limits.step_timeout_s:.0f} s along {self.chain}; "
                "one of its nodes hangs"
            ) from None
        return StepSettled(result.epoch, result.step, tuple(result.tokens), tuple(result.trace))

    async def _repair(self, action: RepairChain) -> ChainReady:
        logger.warning("lost %s (%s); looking for another chain", action.lost, action.reason)
        self.repairs.append(f"{action.lost}: {action.reason}")
        if len(self.repairs) > MAX_REPAIRS:
            raise ConnectionLost(f"gave up after {MAX_REPAIRS} broken chains; the last reason: {action.reason}")
        self._banned.add(action.lost)
        await self._close()
        return await self._connect()

    async def _connect(self) -> ChainReady:
        """Open the best chain; while none can be had, wait for the swarm to change until `route_timeout_s`."""
        deadline = asyncio.get_running_loop().time() + self.limits.route_timeout_s
        cause: NetworkError | None = None
        while True:
            try:
                self._session = await self.open_chain(frozenset(self._banned), tuple(self.generation.known))
            except HopFailed as failed:
                logger.info("node %s would not open: %s", failed.peer, failed)
                self._banned.add(failed.peer)
                cause = failed.cause
                continue
            except NoRoute as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise _explained(error, cause) from cause
                self._banned.clear()  # a node that was busy or gone may be back
                await asyncio.sleep(ROUTE_RETRY_S)
                continue
            self.chain = self._session.chain
            if self.speculator is not None:
                self.speculator.chain_ready(self.chain)
            return ChainReady()

    async def _close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


def _explained(error: NoRoute, cause: NetworkError | None) -> Exception:
    """A swarm whose nodes all refuse says why they do; one that lacks layers says which."""
    if isinstance(cause, RemoteError):
        return cause
    return error if cause is None else NoRoute(f"{error} (the last node tried: {cause})", error.missing)
