"""What becomes of a session once it was admitted: its route is opened, its steps run in order, its outputs sent on.

Owns the order of things within one session, and what a lost next hop means: the session stays, with all it holds, until
its client names another (design section 4, Recovery). Knows no table of sessions and no tensors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.config import Limits
from swarm.errors import ConnectionLost, NetworkError, PeerUnreachable, ProtocolError
from swarm.messages import Failed, Opened, Reroute, Result, Step
from swarm_node.serving.activation_log import HopLogs
from swarm_node.serving.executor import StepOutcome
from swarm_node.serving.kv_transfer import Handover, Pool
from swarm_node.serving.served_spans import Home
from swarm_node.serving.session import Arrival, Link, Session

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Counters:
    """What happened since the start, for `status` and the record."""

    sessions: int = 0
    steps: int = 0
    tokens: int = 0
    failed: int = 0
    refused: int = 0
    replayed: int = 0  # tokens whose outputs were sent once more
    inherited: int = 0  # tokens whose keys and values came from a node that left
    protocol_errors: int = 0
    last_errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """One a node. `tell` sends a message when its peer has time for it, without waiting."""

    pool: Pool
    limits: Limits
    logs: HopLogs
    counters: Counters
    tell: Callable[[Link, Failed], None]
    handover: Handover

    async def run(self, session: Session, home: Home) -> None:
        """Until the session is over, or its task cancelled. Raises SwarmError, TimeoutError when nothing comes."""
        await self._connect(session)
        if session.legacy is not None and await self.handover.take(session, home, session.legacy):
            self.logs.close(session.key)  # what was sent on for these tokens, the node before us knows
            self.counters.inherited += session.committed
        relay = session.next_hop is session.client
        await session.client.send(Opened(session.id, relay, session.epoch, session.committed))
        while True:
            async with asyncio.timeout(self.limits.session_idle_s):
                item = await session.next()
            if isinstance(item, Reroute):
                await self._reroute(session, item)
            else:
                await self._step(session, home, item)
                session.done = max(session.done, item.step.step + 1)

    def lose_next(self, session: Session, error: NetworkError) -> None:
        """The next hop is gone: keep everything, tell the client, and wait for it to name another."""
        session.next_hop, session.stalled, session.told_epoch = None, True, session.epoch
        logger.info("session %s waits for another next hop: %s", session.id.hex(), error)
        news = Failed(session.id, error.code, str(error)[:1024], lost=session.downstream, epoch=session.epoch)
        self.tell(session.client, news)

    async def _connect(self, session: Session) -> None:
        """Reach the next hop, or leave that edge to the client."""
        if session.tail:
            return
        try:
            session.next_hop = await self.pool.get(
                session.downstream, session.downstream_addresses, self.limits.next_hop_dial_timeout_s
            )
        except PeerUnreachable as error:
            logger.info("the client relays for session %s: %s", session.id.hex(), error)
            session.next_hop = session.client

    async def _step(self, session: Session, home: Home, arrival: Arrival) -> None:
        if session.stalled:
            if session.epoch > session.told_epoch:  # the client has not understood, or has mended another place
                self.lose_next(session, ConnectionLost(f"the next hop {session.downstream} is lost"))
            return
        held = session.committed
        step = session.admit(arrival.step)
        if step.base < held:
            home.engine.rollback(session.key, step.base)
            home.computed(session.key, step.base)
            self.logs.rollback(session.key, step.base)
        session.begun_s = asyncio.get_running_loop().time()
        outcome = await home.executor.run(session, Arrival(step, arrival.body))
        session.begun_s = None
        home.computed(session.key, session.committed)
        self.counters.steps += 1
        if not session.tail:
            self.logs.append(session.key, step, outcome.output.body)
        if not session.silent(step):
            await self._deliver(session, arrival.step, outcome)

    async def _deliver(self, session: Session, step: Step, outcome: StepOutcome) -> None:
        """Send what a step became, with the step's own `base` and `commit`: each hop applies them for itself."""
        trace = [*step.trace, (outcome.queue_ms, outcome.compute_ms)]
        sessions = max(step.sessions, outcome.sessions)
        output = outcome.output
        if session.tail:
            if output.tokens:
                self.counters.tokens += 1 + len(step.commit)
            if step.line and output.tokens:
                session.drew(output.tokens[0], session.committed)
            await session.client.send(
                Result(
                    session=step.session,
                    epoch=step.epoch,
                    step=step.step,
                    tokens=list(output.tokens),
                    trace=trace,
                    sessions=sessions,
                    heads=output.heads,
                    guessed=list(output.guessed),
                    doubts=list(output.doubts),
                )
            )
            return
        onward = Step(
            session=step.session,
            epoch=step.epoch,
            step=step.step,
            base=step.base,
            line=step.line,
            sample=step.sample,
            parents=step.parents,
            slots=step.slots,
            commit=step.commit,
            trace=trace,
            sessions=sessions,
        )
        await self._send_on(session, onward, output.body)

    async def _send_on(self, session: Session, step: Step, body: bytes | bytearray | memoryview) -> None:
        """Nothing is sent that a newer epoch has made useless, and nothing is waited for once another hop is named."""
        if session.next_hop is None or step.epoch < session.epoch:
            return
        try:
            async with asyncio.timeout(self.limits.step_timeout_s) as session.sending:
                await session.next_hop.send(step, body)
        except TimeoutError:
            if step.epoch >= session.epoch:
                self.lose_next(session, ConnectionLost(f"the next hop {session.downstream} does not read"))
        except ConnectionLost as error:
            if not session.stalled:
                self.lose_next(session, ConnectionLost(f"lost the next hop {session.downstream}: {error}"))
        finally:
            session.sending = None

    async def _reroute(self, session: Session, message: Reroute) -> None:
        """Take a new upstream, a new next hop, or both; feed the latter what it has missed. Raises LogLost."""
        if message.replay > session.committed:
            raise ProtocolError(f"{message.replay} tokens are to be replayed and this hop holds {session.committed}")
        upstream = message.upstream or session.client.peer
        if upstream != session.upstream:
            session.former.append(session.upstream)
            session.upstream = upstream
        rows = self.logs.replay(session.key, message.replay) if message.replay else iter(())
        if message.downstream != session.downstream or session.stalled or message.replay:
            session.downstream = message.downstream
            session.downstream_addresses = tuple(message.downstream_addresses)
            session.next_hop, session.stalled = None, False
            await self._connect(session)
        await session.client.send(Opened(session.id, session.next_hop is session.client, message.epoch))
        for start, count, body in rows:
            self.counters.replayed += count
            await self._send_on(session, Step(session.id, message.epoch, 0, start, count, sample=False), body)
