"""One session opened on every hop of one chain, and repaired in place when hops fail (docs/recovery.md).

Owns the session's id, the relaying of edges that hops could not dial, and the messages of a repair. It performs: which
chain to open is the session manager's choice, when to repair the generation loop's. Knows nothing of tokens to come.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from swarm.audit_messages import AuditQuery, AuditReport
from swarm.block_hash import block_hashes, salted
from swarm.config import Limits
from swarm.errors import ConnectionLost, NetworkError, ProtocolError
from swarm.kv_token import fetch_token, hop_key
from swarm.messages import (
    MAX_BLOCK_HASHES,
    DropInFlight,
    ProgressQuery,
    ProgressReport,
    Reroute,
    SessionFailed,
    SessionOpened,
    Step,
    StepResult,
)
from swarm.net.base.tasks import run_all
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.planner.generation.state_machine import SendStep
from swarm.planner.routing.repair import Repair
from swarm.receipts import WorkReceipt
from swarm.tap_messages import CarriedTaps, EndDrafts, TailDraft, TapRows
from swarm.types import Chain, Hop, KvSource, NodeProfile, PeerId
from swarm_client.health.stall_locator import HopProgress
from swarm_client.health.watchdog import wait_with_watchdog
from swarm_client.home.ends import HomeEnds
from swarm_client.home.local_layers import foreign
from swarm_client.home.trusted_ends import TrustedEnds
from swarm_client.network.session_demux import ReceivedMessage, SessionDemux
from swarm_client.session.edge_relay import EdgeRelay
from swarm_client.session.hop_links import HopFailed, HopLinks
from swarm_client.session.progress_replies import ProgressReplies
from swarm_client.session.session_drafts import SessionDrafts
from swarm_client.session.session_messages import (
    SessionSpec,
    kv_sources,
    leading_replacements,
    leading_unchanged,
    open_message,
    remote_error,
    replay_steps,
    step_message,
)
from swarm_client.trust.failures import ReportedLost


@dataclass(slots=True)
class InferenceSession:
    """Use `await InferenceSession.open(...)`; then `send`, `receive`, `close`, and `apply_repair` after HopFailed.

    `last_ready_chain`: the last chain all of whose hops were ready, and hold what is committed; `chain` is ahead of it
    during a repair.
    """

    id: bytes
    chain: Chain
    spec: SessionSpec
    _pool: ConnectionPool
    _demux: SessionDemux
    _limits: Limits
    _inbox: asyncio.Queue[ReceivedMessage]
    block_hashes: Sequence[bytes] = ()  # of the text so far, which hops look up in their prefix caches
    epoch: int = 0  # of the last repair: older replies are stale
    prefix_salts: Mapping[PeerId, bytes] = field(default_factory=dict)  # of hops all of whose rows came the same way
    cached_tokens: int = 0  # tokens that all hops found in their prefix caches when the session was opened
    last_ready_chain: Chain = field(default_factory=lambda: Chain(()))
    _secret: bytes = field(default_factory=lambda: os.urandom(32), repr=False)  # of the hops' keys, see `kv_token`
    drafts: SessionDrafts = field(init=False)
    _links: HopLinks = field(init=False)
    _detached: dict[PeerId, int] = field(default_factory=dict)  # departed nodes -> tokens whose KV they still hold
    _accusers: dict[PeerId, PeerId] = field(default_factory=dict)  # hop -> the first next hop it called unreachable
    ends: HomeEnds | TrustedEnds | None = None  # the hops at this client itself, or whom it trusts
    _relay: EdgeRelay = field(init=False)
    _step: int = 0  # the last that was sent
    _progress: ProgressReplies = field(default_factory=ProgressReplies)

    def __post_init__(self) -> None:
        self._relay, ping_s = EdgeRelay(self.ends, self.spec.dtype), self._limits.ping_timeout_s
        self._links = HopLinks(self.id, lambda: self.chain.peers, ping_s, self._pool, local=self._relay.links)
        self.drafts = SessionDrafts(self.spec.taps, self.spec.tail)

    @classmethod
    async def open(
        cls,
        chain: Chain,
        nodes: Mapping[PeerId, NodeProfile],
        spec: SessionSpec,
        history: Sequence[int],
        pool: ConnectionPool,
        demux: SessionDemux,
        limits: Limits,
        epoch: int = 0,
        prefix_salts: Mapping[PeerId, bytes] = {},
        ends: HomeEnds | TrustedEnds | None = None,
    ) -> InferenceSession:
        """Dial every hop, open the session on all of them at once and wait until all are ready. Raises HopFailed.

        `prefix_salts`: of each hop's block hashes (`PrefixLocations.salts`); a hop without one uses no prefix cache.
        """
        session = os.urandom(16)
        hashes = block_hashes(history[:-1])[:MAX_BLOCK_HASHES]  # the last token is sent anyway, to sample after it
        if spec.sampling.prompt_logprobs is not None:
            hashes = []  # cached rows have no logits
        inbox = demux.register(session)
        self = cls(session, chain, spec, pool, demux, limits, inbox, hashes, epoch, prefix_salts, ends=ends)
        self.drafts.begin(len(history))
        try:
            held = await self._open_hops(dict.fromkeys(chain.hops, 0), nodes, history)
            self.cached_tokens = min(held.values())
        except BaseException:
            await self.close()
            raise
        self.last_ready_chain, self.block_hashes = chain, ()  # the other hops replay everything to a replacement
        return self

    async def send(self, action: SendStep) -> None:
        """Send a step to the first hop. Raises HopFailed."""
        step = step_message(self.id, action, forward_tokens=self.spec.forward_tokens)
        self._relay.sent(self.chain.peers, step)
        self.drafts.sent(action)
        self._step = action.step
        await self._links.send_watched(self.chain.hops[0].peer, step)

    async def receive(self, probe_after_s: float, on_late: Callable[[], Awaitable[None]]) -> StepResult:
        """The tail's next result. Whenever `probe_after_s` passes without one, all hops are pinged, and if they all
        answer, `on_late` is awaited, which may raise HopFailed as well. It may call `hop_progress`.

        Raises HopFailed.
        """

        async def check() -> None:
            await self._links.probe()
            await on_late()

        return await wait_with_watchdog(self._result(), probe_after_s, check)

    async def hop_progress(self) -> Mapping[PeerId, HopProgress]:
        """The step progress of all hops, or of those that report it in time.

        Only while `receive` waits, which reads the replies. Raises HopFailed.
        """
        self._progress.begin()
        for peer in self.chain.peers:
            await self._links.send(peer, ProgressQuery(self.id))
        return await self._progress.wait(self._links.reply_timeout_s)

    def stalled_hops(self, progress: Mapping[PeerId, HopProgress]) -> tuple[tuple[PeerId, ...], float]:
        """The hops that may have stalled the last step, likeliest first; and for how long no hop has made progress,
        in seconds."""
        return self._progress.stalled(self.chain.peers, progress, self._step)

    async def discard_in_flight(self, epoch: int) -> None:
        """Tell every hop to drop steps before `epoch`, best effort: the next step invalidates them too, only later."""
        await self._links.broadcast(DropInFlight(self.id, epoch))

    async def end_tail_drafts(self) -> None:
        """No more drafts of the tail, best effort: what still comes is ignored."""
        self.drafts.tail = None
        await self._links.broadcast(EndDrafts(self.id))

    async def audit(self, positions: Sequence[int]) -> list[ReceivedMessage]:
        """Ask every hop for its report (`audit_messages`), with the rows at `positions`. -> the hops' replies, in
        order, whose messages are AuditReports. No step may be sent meanwhile. Raises HopFailed."""
        replies: dict[PeerId, ReceivedMessage] = {}
        try:
            async with asyncio.timeout(self._limits.step_timeout_s):
                for peer in self.chain.peers:
                    await self._links.send(peer, AuditQuery(self.id, list(positions)))
                while len(replies) < len(self.chain):
                    incoming = await self._links.await_with_pings(self._next())
                    if isinstance(incoming.message, AuditReport):
                        replies[incoming.peer] = incoming
        except TimeoutError:
            silent = next(peer for peer in self.chain.peers if peer not in replies)
            raise self.mark_failed(silent, ConnectionLost(f"node {silent} does not report for an audit")) from None
        return [replies[peer] for peer in self.chain.peers]

    async def close(
        self, tokens: Sequence[int] = (), receipt: Callable[[bytes, Hop], WorkReceipt] | None = None
    ) -> None:
        """Close at every hop, best effort: a hop that is not reached notices when the connection ends.

        `tokens`: the whole text, whose KV the hops may keep in their prefix caches. `receipt(session, hop)`: a signed
        one for each hop of the chain.
        """
        self._demux.forget(self.id)
        receipts = {hop.peer: receipt(self.id, hop) for hop in foreign(self.last_ready_chain.hops)} if receipt else {}
        hashes = block_hashes(tokens)[:MAX_BLOCK_HASHES]
        retained = {peer: salted(hashes, salt) for peer, salt in self.prefix_salts.items()}
        await self._links.close(self._links.peers, retained, receipts)

    # Repair ----------------------------------------------------------------------------------------------------------

    @property
    def failed_hops(self) -> Mapping[PeerId, NetworkError]:
        """The hops that have failed since the chain was last ready, and why."""
        return self._links.failed

    def mark_failed(self, peer: PeerId, cause: NetworkError) -> HopFailed:
        """Count a hop as failed for a reason that was found elsewhere. -> the error to raise."""
        return self._links.mark_failed(peer, cause)

    def drain_failures(self) -> None:
        """Process what has been received of further failures, without waiting for more."""
        while not self._inbox.empty():
            with contextlib.suppress(HopFailed):
                self._dispatch(self._inbox.get_nowait())

    async def apply_repair(
        self, repair: Repair, nodes: Mapping[PeerId, NodeProfile], tokens: Sequence[int], committed: int, epoch: int
    ) -> None:
        """Go on along `repair.chain`, which repairs `last_ready_chain`. Every hop then holds the first `committed` of
        `tokens`.

        Replacements are opened with this session's id, the hops beside them are rerouted, and what a replacement lacks
        is replayed from the activation log of the hop before it, or from here. `epoch` is newer than that of all steps
        sent so far. Raises HopFailed, and may then be tried again with another repair and a newer epoch.
        """
        hops, kept = repair.chain.hops, set(repair.kept)
        sources = kv_sources(set(hops) - kept, self.last_ready_chain, self._detached, committed, self._permit)
        needed = {hop.peer for hop in kept} | {source.peer for source in sources.values()}
        await self._links.close([p for p in self._links.peers if p not in needed])
        self.chain, self.epoch = repair.chain, epoch
        ended = hops[-1] not in kept and self.drafts.left_by(nodes.get(hops[-1].peer))
        self.drafts.begin(len(tokens), committed)
        self._relay.repaired(committed if hops[-1] not in kept else 0)
        unchanged = leading_unchanged(self.last_ready_chain.hops, hops, kept)
        self.prefix_salts = {peer: salt for peer, salt in self.prefix_salts.items() if peer in unchanged}
        fresh: dict[Hop, int] = {}
        for i, hop in enumerate(hops):
            if hop not in kept:
                last = i + 1 == len(hops) or hops[i + 1] in kept
                fresh[hop] = committed if last else 0
        held = await self._open_hops(fresh, nodes, tokens, sources)
        lacking = {hop.peer for hop in fresh if held[hop.peer] < committed}
        rerouted: list[tuple[int, Hop]] = []
        for i, hop in enumerate(hops):
            beside = (*hops[max(0, i - 1) : i], *hops[i + 1 : i + 2])
            if hop in kept and any(other not in kept for other in beside):
                rerouted.append((i, hop))
        for i, hop in rerouted:
            replay = committed if lacking.intersection(leading_replacements(hops[i + 1 :], kept)) else 0
            await self._links.send_watched(hop.peer, self._reroute(i, replay))
        await self._all_open({hop.peer for _, hop in rerouted})
        if lacking.intersection(leading_replacements(hops, kept)):
            await self._replay(tokens[:committed])
        await self._links.close([source.peer for source in sources.values()])
        if ended:
            await self.end_tail_drafts()
        self.last_ready_chain = repair.chain
        self._links.failed.clear()
        self._detached.clear()

    def _reroute(self, index: int, replay: int) -> Reroute:
        """To the hop `index` of the chain; `replay`: how many tokens to replay to the hop after it."""
        return Reroute(self.id, self.epoch, *self._relay.beside(self.chain.peers, index), replay)

    def _permit(self, source: PeerId, heir: PeerId) -> bytes:
        return fetch_token(hop_key(self._secret, source), self.id, heir)

    async def _replay(self, tokens: Sequence[int]) -> None:
        """Replay to a new first hop what the others hold already."""
        forward = self.spec.forward_tokens
        for step in replay_steps(self.id, self.epoch, tokens, forward_tokens=forward):
            await self._links.send_watched(self.chain.hops[0].peer, step)

    # Opening ---------------------------------------------------------------------------------------------------------

    async def _open_hops(
        self,
        hops: Mapping[Hop, int],
        nodes: Mapping[PeerId, NodeProfile],
        history: Sequence[int],
        sources: Mapping[PeerId, KvSource] | None = None,
    ) -> dict[PeerId, int]:
        """Open the session on `hops` (of the chain; with their `replay_silent_until`) and wait until all are ready.

        -> of how many tokens each of them holds the KV.
        """
        waiting = {hop.peer for hop in hops}
        try:
            async with asyncio.timeout(self._limits.open_timeout_s):
                await run_all(
                    self._open_hop(hop, silent_until, nodes, history, (sources or {}).get(hop.peer))
                    for hop, silent_until in hops.items()
                )
                return await self._all_open(waiting)
        except TimeoutError:
            late = next(hop.peer for hop in hops if hop.peer in waiting)
            raise self.mark_failed(late, ConnectionLost(f"node {late} did not open the session in time")) from None

    async def _open_hop(
        self,
        hop: Hop,
        silent_until: int,
        nodes: Mapping[PeerId, NodeProfile],
        history: Sequence[int],
        source: KvSource | None,
    ) -> None:
        before, after = self._relay.beside(self.chain.peers, self.chain.hops.index(hop))
        message = open_message(self.id, self.spec, hop, before, after, history, source, hop_key(self._secret, hop.peer))
        salt = self.prefix_salts.get(hop.peer)
        hashes = salted(self.block_hashes, salt) if salt is not None else []
        taps = self.drafts.asked_of(hop, tail=not after)
        message = msgspec.structs.replace(
            message, epoch=self.epoch, replay_silent_until=silent_until, block_hashes=hashes, taps=taps
        )
        timeout_s = self._limits.next_hop_dial_timeout_s if self.epoch else self._limits.dial_timeout_s
        addresses = nodes[hop.peer].addresses if hop.peer in nodes else ()
        await self._links.dial(hop.peer, addresses, timeout_s)
        await self._links.send(hop.peer, message)

    async def _all_open(self, waiting: set[PeerId]) -> dict[PeerId, int]:
        """Wait until all of `waiting` have answered an OpenSession or Reroute of this epoch. -> tokens each holds."""
        held: dict[PeerId, int] = {}
        while waiting:
            incoming = await self._links.await_with_pings(self._next())
            opened = incoming.message
            if isinstance(opened, SessionOpened) and opened.epoch == self.epoch:
                waiting.discard(incoming.peer)
                held[incoming.peer] = opened.cached_tokens
                self._relay.opened(incoming.peer, relays=opened.client_relays_next_edge)
        return held

    # Frames ----------------------------------------------------------------------------------------------------------

    async def _result(self) -> StepResult:
        while True:
            incoming = await self._next()
            if isinstance(incoming.message, StepResult) and incoming.peer == self.chain.peers[-1]:
                self.drafts.finished(incoming.message.step)
                return incoming.message

    async def _next(self) -> ReceivedMessage:
        """The next reply. Edges that hops could not dial are relayed on the way. Raises HopFailed."""
        while True:
            incoming = self._dispatch(await self._inbox.get())
            if incoming is None:
                continue
            step = incoming.message
            if isinstance(step, ProgressReport):
                self._progress.add(incoming.peer, step, self.chain.peers)
            elif not isinstance(step, Step | CarriedTaps | TapRows | TailDraft):
                return incoming
            elif step.epoch >= self.epoch:
                await self._pass_on(incoming, step)

    async def _pass_on(self, incoming: ReceivedMessage, message: Step | CarriedTaps | TapRows | TailDraft) -> None:
        """A step and what it carries to the next hop, the rest to where it is used. Raises HopFailed."""
        onward = None
        try:
            if isinstance(message, TapRows | TailDraft):
                self.drafts.add(self.chain, incoming.peer, message, incoming.body)
            else:
                onward = self._relay.onward(self.chain.peers, incoming, message)
        except ProtocolError as error:
            raise self.mark_failed(incoming.peer, error) from None
        if onward is not None:
            await self._links.send(*onward, incoming.body)

    def _dispatch(self, incoming: ReceivedMessage) -> ReceivedMessage | None:
        """None for what does not concern the chain in use: another session's node, or an evicted one.

        Raises HopFailed.
        """
        if incoming.peer not in self.chain.peers:
            return None
        if incoming.error is not None:
            raise self.mark_failed(incoming.peer, incoming.error)
        failed = incoming.message
        if not isinstance(failed, SessionFailed):
            return incoming
        if failed.epoch < self.epoch:
            return None  # from before a repair
        if not failed.unreachable_next_hop:
            self._detached[incoming.peer] = failed.kv_retained_tokens
            raise self.mark_failed(incoming.peer, remote_error(incoming.peer, failed))
        if failed.unreachable_next_hop not in self.chain.peers:
            return None
        if self._accusers.get(incoming.peer, failed.unreachable_next_hop) != failed.unreachable_next_hop:
            raise self.mark_failed(incoming.peer, ConnectionLost(f"node {incoming.peer} reaches none of its next hops"))
        self._accusers[incoming.peer] = failed.unreachable_next_hop
        raise self.mark_failed(failed.unreachable_next_hop, ReportedLost(failed.detail))
