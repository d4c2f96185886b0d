"""Runs an admitted session: dials the next hop, runs the steps in order, forwards the outputs.

Owns the order within one session, and what a lost next hop means: the session stays, with all it holds, until its
client reroutes it. Uses neither the table of sessions nor tensors.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from swarm.codec import Buffer
from swarm.config import Limits
from swarm.errors import ConnectionLost, NetworkError, OutOfMemory, PeerUnreachable, ProtocolError
from swarm.messages import Reroute, SessionFailed, SessionOpened, Step, StepResult, WireLogprobs
from swarm.planner.scheduling.fair_shares import Share
from swarm.planner.scheduling.stage_times import StageTimes
from swarm.tap_messages import CarriedTaps, TailDraft, TapRows
from swarm_hop.auditing.audit_replies import AuditReplies
from swarm_hop.drafting.tail_drafts import draft_message
from swarm_hop.serving.activation_log import ActivationLog
from swarm_hop.serving.executor import StepOutcome, StepOutput
from swarm_hop.serving.hop_dialer import HopDialer
from swarm_hop.serving.kv_transfer import KvTransfer
from swarm_hop.serving.served_spans import ServedSpan
from swarm_hop.serving.session import HopSession, InboundStep, PeerChannel
from swarm_hop.serving.step_cutter import cut, join
from swarm_kernels.sampling.grammar import TokenMask

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Counters:
    """Counted since the start, for `status` and Prometheus."""

    sessions: int = 0
    steps: int = 0
    tokens: int = 0
    layer_tokens: int = 0  # rows computed, drafts included, times layers
    failed: int = 0
    refused: int = 0
    replayed: int = 0  # tokens whose outputs were replayed
    kv_transferred: int = 0  # tokens whose KV cache came from a node that left
    protocol_errors: int = 0
    last_errors: list[str] = field(default_factory=list)
    times: StageTimes = field(default_factory=StageTimes)

    def took(self, rows: int, outcome: StepOutcome, send_s: float, total_s: float) -> None:
        """A step has run; `total_s`: since its frame came."""
        queue_ms = max(0.0, outcome.queue_ms - outcome.plan_ms)  # a batch waits for its plan as well
        self.times += StageTimes(
            steps=1,
            rows=rows,
            total=total_s * 1e3,
            queue=queue_ms,
            plan=outcome.plan_ms,
            kernels=outcome.compute_ms,
            handover=outcome.handover_ms,
            send=send_s * 1e3,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SessionRunner:
    """One per node. `reply` sends a message without waiting for its peer to read."""

    dialer: HopDialer
    limits: Limits
    logs: ActivationLog
    audits: AuditReplies
    counters: Counters
    reply: Callable[[PeerChannel, SessionFailed], None]
    kv_transfer: KvTransfer
    make_room: Callable[[ServedSpan, Share, int], bool]
    """See `AdmissionControl.make_room`."""

    async def run(self, session: HopSession, served_span: ServedSpan) -> None:
        """Until the session is over, or its task cancelled. Raises SwarmError, TimeoutError when nothing comes."""
        if session.sampling.grammar is not None:
            grammar = session.sampling.grammar
            session.grammar = await served_span.engine.compile_grammar(grammar, session.share)
        if session.taps is not None and served_span.engine.tail_drafts is not None:
            session.drafted = served_span.engine.tail_drafts.open(session.taps, session.max_tokens)
        await self._connect(session)
        if session.kv_source is not None and await self.kv_transfer.fetch(session, served_span, session.kv_source):
            self.logs.close(session.key)  # the source of the transfer had sent these outputs
            self.audits.digests.open(session.key, session.committed)
            self.counters.kv_transferred += session.committed
        relay = session.next_hop is session.client
        await session.client.send(SessionOpened(session.id, relay, session.epoch, session.committed))
        while True:
            async with asyncio.timeout(self.limits.session_idle_s):
                item = await session.next()
            if isinstance(item, Reroute):
                await self._reroute(session, item)
            else:
                await self._step(session, served_span, item)
                session.completed = max(session.completed, item.step.step + 1)

    def report_next_hop_lost(self, session: HopSession, error: NetworkError) -> None:
        """The next hop is lost: keep everything, notify the client, and wait for its Reroute."""
        session.next_hop, session.stalled, session.notified_epoch = None, True, session.epoch
        logger.info("session %s waits for another next hop: %s", session.id.hex(), error)
        failure = SessionFailed(
            session.id, error.code, str(error)[:1024], unreachable_next_hop=session.downstream, epoch=session.epoch
        )
        self.reply(session.client, failure)

    async def _connect(self, session: HopSession) -> None:
        """Reach the next hop, or leave that edge to the client, who may be that hop itself."""
        if session.tail:
            return
        if session.downstream == session.client.peer:
            session.next_hop = session.client
            return
        try:
            session.next_hop = await self.dialer.get(session.client.peer, session.downstream)
        except PeerUnreachable as error:
            logger.info("the client relays for session %s: %s", session.id.hex(), error)
            session.next_hop = session.client

    async def _step(self, session: HopSession, served_span: ServedSpan, arrival: InboundStep) -> None:
        if session.stalled:
            if session.epoch > session.notified_epoch:  # the client has not rerouted us, or has repaired another hop
                self.report_next_hop_lost(session, ConnectionLost(f"the next hop {session.downstream} is lost"))
            return
        before = session.committed
        step = session.admit(arrival.step)
        if step.committed_before < before:
            served_span.engine.rollback(session.key, step.committed_before)
            served_span.computed(session.key, step.committed_before)
            self.logs.rollback(session.key, step.committed_before)
            self.audits.digests.rollback(session.key, step.committed_before)
        session.started_s = asyncio.get_running_loop().time()
        outcome = await self._compute(session, served_span, step, arrival.body)
        session.started_s = None
        served_span.computed(session.key, session.committed)
        self.counters.steps += 1
        self.counters.layer_tokens += step.rows * len(session.span)
        output = outcome.output
        self.audits.record(session, step, arrival.body, output.body, output.tokens, output.margins)
        if not session.tail:
            self.logs.append(session.key, step, outcome.output.body)
        draft = await self._draft(session, served_span, step, output)
        computed_s = time.perf_counter()
        if not session.is_replay(step):
            await self._deliver(session, arrival.step, outcome, draft)
        sent_s = time.perf_counter()
        self.counters.took(step.rows, outcome, sent_s - computed_s, sent_s - arrival.arrived_s)

    async def _draft(
        self, session: HopSession, served_span: ServedSpan, step: Step, output: StepOutput
    ) -> TailDraft | None:
        """What the tail's drafter says after a step, if its client asked for that and the text went on."""
        text, asked = session.drafted, session.taps.draft if session.taps is not None else None
        if text is None or asked is None:
            return None
        text.follow(step, output.tokens, session.taps_for_tail(step.step, output.taps))
        if step.epoch < session.epoch or not output.tokens or not text.due():
            return None
        tree, took_ms = await served_span.executor.run_beside(session.share, text.grow)
        return draft_message(asked, step, text.position, tree, took_ms)

    async def _compute(self, session: HopSession, served_span: ServedSpan, step: Step, body: Buffer) -> StepOutcome:
        """Run a step that was admitted, in pieces while others wait for the device."""
        pieces: list[StepOutcome] = []
        if step.sample_all and session.sampling.needs_history:
            step = msgspec.structs.replace(step, sample_all=False)
        rest: tuple[Step, Buffer] | None = (step, body)
        while rest is not None:
            rows = served_span.executor.rows_at_once(session, rest[0].committed_before)
            (piece, part), rest = cut(*rest, rows or rest[0].rows)
            tokens = session.history.apply(piece) if session.history is not None else None
            masks: Sequence[TokenMask | None] = ()
            if session.grammar is not None and tokens is not None:
                masks = await served_span.engine.grammar_masks(session.grammar, tokens, session.client.peer)
            pieces.append(await self._run_piece(session, served_span, InboundStep(piece, part, tokens, masks)))
        return join(pieces)

    async def _run_piece(self, session: HopSession, served_span: ServedSpan, piece: InboundStep) -> StepOutcome:
        try:
            return await served_span.executor.run(session, piece)
        except OutOfMemory:  # its reservation was shrunk, or it has a tree on top of a full context
            if not self.make_room(served_span, session.share, piece.step.rows + len(piece.step.commit_slots)):
                raise
        return await served_span.executor.run(session, piece)

    async def _deliver(
        self, session: HopSession, step: Step, outcome: StepOutcome, draft: TailDraft | None = None
    ) -> None:
        """Send the output with the step's own `committed_before` and `commit_slots`: each hop applies them itself."""
        trace = [*step.trace, (outcome.queue_ms, outcome.compute_ms)]
        sessions = max(step.active_sessions, outcome.sessions)
        output = outcome.output
        if session.tail:
            await self._send_taps(session, step, output)
            if draft is not None:
                await session.client.send(draft)
            if output.tokens:
                self.counters.tokens += 1 + len(step.commit_slots)
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
                    logprobs=[WireLogprobs.of(logprobs) for logprobs in output.logprobs],
                    prompt_logprobs=[WireLogprobs.of(logprobs) for logprobs in output.prompt_logprobs],
                )
            )
            return
        forwarded = Step(
            session=step.session,
            epoch=step.epoch,
            step=step.step,
            committed_before=step.committed_before,
            causal_rows=step.causal_rows,
            sample=step.sample,
            tokens=step.tokens if step.forward_tokens else [],
            parents=step.parents,
            slots=step.slots,
            commit_slots=step.commit_slots,
            trace=trace,
            active_sessions=sessions,
            forward_tokens=step.forward_tokens,
            sample_all=step.sample_all,
        )
        await self._carry_taps(session, step, output)
        await self._forward(session, forwarded, output.body)
        await self._send_taps(session, step, output)

    async def _carry_taps(self, session: HopSession, step: Step, output: StepOutput) -> None:
        """On to the next hop, so that the tail has them with the step."""
        taps = session.taps_for_tail(step.step, output.taps) if session.taps and session.taps.onward else ()
        if taps:
            message = CarriedTaps(session.id, step.epoch, step.step, [layer for layer, _ in taps])
            await self._forward(session, message, b"".join(rows for _, rows in taps))

    async def _send_taps(self, session: HopSession, step: Step, output: StepOutput) -> None:
        """To the client: at the tail before the result, which the drafter follows; else once the step went on."""
        if step.epoch >= session.epoch and session.taps is not None and not session.taps.for_tail:
            for layer, rows in output.taps:
                await session.client.send(TapRows(session.id, step.epoch, step.step, layer), rows)

    async def _forward(
        self, session: HopSession, step: Step | CarriedTaps, body: bytes | bytearray | memoryview
    ) -> None:
        """Skip steps of an old epoch; a Reroute cuts the send short."""
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
        """Take a new upstream, a new next hop, or both; replay to the latter what it missed.

        Raises ActivationLogEvicted.
        """
        if message.replay > session.committed:
            raise ProtocolError(f"{message.replay} tokens are to be replayed and this hop holds {session.committed}")
        upstream = message.upstream or session.client.peer
        if upstream != session.upstream:
            session.previous_upstreams.append(session.upstream)
            session.upstream = upstream
        rows = self.logs.replay(session.key, message.replay) if message.replay else iter(())
        if message.downstream != session.downstream or session.stalled or message.replay:
            session.downstream = message.downstream
            session.next_hop, session.stalled = None, False
            await self._connect(session)
        await session.client.send(SessionOpened(session.id, session.next_hop is session.client, message.epoch))
        for start, count, body in rows:
            self.counters.replayed += count
            await self._forward(session, Step(session.id, message.epoch, 0, start, count, sample=False), body)
