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
from swarm.messages import Reroute, SessionFailed, SessionOpened, Step, StepResult
from swarm_node.serving.activation_log import ActivationLog
from swarm_node.serving.executor import StepOutcome
from swarm_node.serving.kv_transfer import ConnectionSource, KvTransfer
from swarm_node.serving.served_spans import ServedSpan
from swarm_node.serving.session import HopSession, InboundStep, PeerChannel

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
    kv_transferred: int = 0  # tokens whose keys and values came from a node that left
    protocol_errors: int = 0
    last_errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class SessionRunner:
    """One a node. `tell` sends a message when its peer has time for it, without waiting."""

    pool: ConnectionSource
    limits: Limits
    logs: ActivationLog
    counters: Counters
    reply: Callable[[PeerChannel, SessionFailed], None]
    kv_transfer: KvTransfer

    async def run(self, session: HopSession, home: ServedSpan) -> None:
        """Until the session is over, or its task cancelled. Raises SwarmError, TimeoutError when nothing comes."""
        await self._connect(session)
        if session.kv_source is not None and await self.kv_transfer.fetch(session, home, session.kv_source):
            self.logs.close(session.key)  # what was sent on for these tokens, the node before us knows
            self.counters.kv_transferred += session.committed
        relay = session.next_hop is session.client
        await session.client.send(SessionOpened(session.id, relay, session.epoch, session.committed))
        while True:
            async with asyncio.timeout(self.limits.session_idle_s):
                item = await session.next()
            if isinstance(item, Reroute):
                await self._reroute(session, item)
            else:
                await self._step(session, home, item)
                session.completed = max(session.completed, item.step.step + 1)

    def report_next_hop_lost(self, session: HopSession, error: NetworkError) -> None:
        """The next hop is gone: keep everything, tell the client, and wait for it to name another."""
        session.next_hop, session.stalled, session.notified_epoch = None, True, session.epoch
        logger.info("session %s waits for another next hop: %s", session.id.hex(), error)
        news = SessionFailed(
            session.id, error.code, str(error)[:1024], unreachable_next_hop=session.downstream, epoch=session.epoch
        )
        self.reply(session.client, news)

    async def _connect(self, session: HopSession) -> None:
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

    async def _step(self, session: HopSession, home: ServedSpan, arrival: InboundStep) -> None:
        if session.stalled:
            if session.epoch > session.notified_epoch:  # the client has not understood, or has mended another place
                self.report_next_hop_lost(session, ConnectionLost(f"the next hop {session.downstream} is lost"))
            return
        held = session.committed
        step = session.admit(arrival.step)
        if step.committed_before < held:
            home.engine.rollback(session.key, step.committed_before)
            home.computed(session.key, step.committed_before)
            self.logs.rollback(session.key, step.committed_before)
        session.begun_s = asyncio.get_running_loop().time()
        outcome = await home.executor.run(session, InboundStep(step, arrival.body))
        session.begun_s = None
        home.computed(session.key, session.committed)
        self.counters.steps += 1
        if not session.tail:
            self.logs.append(session.key, step, outcome.output.body)
        if not session.is_replay(step):
            await self._deliver(session, arrival.step, outcome)

    async def _deliver(self, session: HopSession, step: Step, outcome: StepOutcome) -> None:
        """Send what a step became, with the step's own `base` and `commit`: each hop applies them for itself."""
        trace = [*step.trace, (outcome.queue_ms, outcome.compute_ms)]
        sessions = max(step.active_sessions, outcome.sessions)
        output = outcome.output
        if session.tail:
            if output.tokens:
                self.counters.tokens += 1 + len(step.commit_slots)
            if step.causal_rows and output.tokens:
                session.record_sample(output.tokens[0], session.committed)
            await session.client.send(
                StepResult(
                    session=step.session,
                    epoch=step.epoch,
                    step=step.step,
                    tokens=list(output.tokens),
                    trace=trace,
                    active_sessions=sessions,
                    num_medusa_heads=output.num_medusa_heads,
                    medusa_ids=list(output.medusa_ids),
                    medusa_neg_logprob_centinats=list(output.medusa_neg_logprob_centinats),
                )
            )
            return
        onward = Step(
            session=step.session,
            epoch=step.epoch,
            step=step.step,
            committed_before=step.committed_before,
            causal_rows=step.causal_rows,
            sample=step.sample,
            parents=step.parents,
            slots=step.slots,
            commit_slots=step.commit_slots,
            trace=trace,
            active_sessions=sessions,
        )
        await self._send_on(session, onward, output.body)

    async def _send_on(self, session: HopSession, step: Step, body: bytes | bytearray | memoryview) -> None:
        """Nothing is sent that a newer epoch has made useless, and nothing is waited for once another hop is named."""
        if session.next_hop is None or step.epoch < session.epoch:
            return
        try:
            async with asyncio.timeout(self.limits.step_timeout_s) as session.sending:
                await session.next_hop.send(step, body)
        except TimeoutError:
            if step.epoch >= session.epoch:
                self.report_next_hop_lost(session, ConnectionLost(f"the next hop {session.downstream} does not read"))
        except ConnectionLost as error:
            if not session.stalled:
                self.report_next_hop_lost(session, ConnectionLost(f"lost the next hop {session.downstream}: {error}"))
        finally:
            session.sending = None

    async def _reroute(self, session: HopSession, message: Reroute) -> None:
        """Take a new upstream, a new next hop, or both; feed the latter what it has missed. Raises ActivationLogEvicted."""
        if message.replay > session.committed:
            raise ProtocolError(f"{message.replay} tokens are to be replayed and this hop holds {session.committed}")
        upstream = message.upstream or session.client.peer
        if upstream != session.upstream:
            session.previous_upstreams.append(session.upstream)
            session.upstream = upstream
        rows = self.logs.replay(session.key, message.replay) if message.replay else iter(())
        if message.downstream != session.downstream or session.stalled or message.replay:
            session.downstream = message.downstream
            session.downstream_addresses = tuple(message.downstream_addresses)
            session.next_hop, session.stalled = None, False
            await self._connect(session)
        await session.client.send(SessionOpened(session.id, session.next_hop is session.client, message.epoch))
        for start, count, body in rows:
            self.counters.replayed += count
            await self._send_on(session, Step(session.id, message.epoch, 0, start, count, sample=False), body)
