"""One session opened on every hop of one chain, and mended in place when hops are lost (docs/recovery.md).

Owns its id, its connections, the edges the client relays, and who was lost. Knows nothing of tokens to come.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from swarm.block_hash import block_hashes
from swarm.codec import Buffer
from swarm.config import Limits
from swarm.errors import ConnectionLost, NetworkError, ProtocolError
from swarm.messages import (
    MAX_BLOCK_HASHES,
    AnyMessage,
    CloseSession,
    DropInFlight,
    ProgressQuery,
    ProgressReport,
    Reroute,
    SessionFailed,
    SessionOpened,
    Step,
    StepResult,
)
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.net.pool.migratable_link import MigratableLink
from swarm.planner.generation.state_machine import SendStep
from swarm.planner.routing.repair import Repair
from swarm.types import Chain, Hop, KvSource, NodeProfile, PeerId
from swarm_client.health.ping_failure_detector import PingFailureDetector
from swarm_client.health.stall_locator import HopProgress, StallTimer, stalled_hops
from swarm_client.health.watchdog import wait_with_watchdog
from swarm_client.network.session_demux import ReceivedMessage, SessionDemux
from swarm_client.session.session_messages import (
    SessionSpec,
    kv_sources,
    leading_replacements,
    open_message,
    remote_error,
    reroute_message,
)

_T = TypeVar("_T")

CLOSE_TIMEOUT_S = 1.0
REPLAY_ROWS = 256  # tokens of one step that feeds a new first hop


class HopFailed(NetworkError):
    """One hop of the chain cannot go on; `peer` is to be left out of the next one and `cause` says why."""

    code = "hop_failed"

    def __init__(self, peer: PeerId, cause: NetworkError) -> None:
        super().__init__(str(cause))
        self.peer = peer
        self.cause = cause


@dataclass(slots=True)
class InferenceSession:
    """Use `await InferenceSession.open(...)`; then `send`, `receive`, `close`, and `repair` after HopFailed.

    `lost`: the peers that are known to be lost, and why. `whole`: the last chain that was ready, whose hops hold what
    has settled; `chain` runs ahead of it during a repair.
    """

    id: bytes
    chain: Chain
    spec: SessionSpec
    _pool: ConnectionPool
    _demux: SessionDemux
    _limits: Limits
    _inbox: asyncio.Queue[ReceivedMessage]
    block_hashes: Sequence[bytes] = ()  # what hops may share of the client's other sessions
    epoch: int = 0  # of the last repair: older answers are stale
    cached_tokens: int = 0  # tokens that all hops had behind them when the session was opened
    failed_hops: dict[PeerId, NetworkError] = field(default_factory=dict)
    last_ready_chain: Chain = field(default_factory=lambda: Chain(()))
    _detached: dict[PeerId, int] = field(default_factory=dict)  # nodes that left, and still hold so many tokens
    _connections: dict[PeerId, MigratableLink] = field(default_factory=dict)
    _relayed: set[PeerId] = field(default_factory=set)
    _failure_detector: PingFailureDetector = field(init=False)
    _step: int = 0  # the last that was sent
    _hop_progress: dict[PeerId, HopProgress] = field(default_factory=dict)  # what hops said of it
    _progress_changed: asyncio.Event = field(default_factory=asyncio.Event)  # all have said
    _stall_timer: StallTimer = field(default_factory=StallTimer)

    def __post_init__(self) -> None:
        self._failure_detector = PingFailureDetector(self._pool, self._limits.ping_timeout_s)

    @classmethod
    async def open(
        cls,
        chain: Chain,
        nodes: Mapping[PeerId, NodeProfile],
        spec: SessionSpec,
        history: Sequence[int],
        pool: ConnectionPool,
        inboxes: SessionDemux,
        limits: Limits,
        epoch: int = 0,
    ) -> InferenceSession:
        """Dial every hop, open the session on all of them at once and wait until all are ready. Raises HopFailed."""
        session = os.urandom(16)
        names = block_hashes(history[:-1])[
            :MAX_BLOCK_HASHES
        ]  # the last token is sent anyway: the next is drawn after it
        self = cls(session, chain, spec, pool, inboxes, limits, inboxes.register(session), names, epoch)
        try:
            held = await self._open_hops(dict.fromkeys(chain.hops, 0), nodes, history)
            self.cached_tokens = min(held.values())
        except BaseException:
            await self.close()
            raise
        self.last_ready_chain, self.block_hashes = chain, ()  # a replacement is fed everything, for the others hold it
        return self

    async def send(self, action: SendStep) -> None:
        """Send a step to the first hop. Raises HopFailed."""
        step = Step(
            session=self.id,
            epoch=action.epoch,
            step=action.step,
            committed_before=action.committed_before,
            causal_rows=len(action.tokens),
            sample=action.sample,
            tokens=[*action.tokens, *action.rows],
            parents=list(action.parents),
            slots=list(action.slots),
            commit_slots=list(action.commit_slots),
        )
        self._step = action.step
        await self._await_with_pings(self._send_to(self.chain.hops[0].peer, step), self._limits.ping_timeout_s)

    async def receive(self, patience_s: float, late: Callable[[], Awaitable[None]]) -> StepResult:
        """The tail's next result. Whenever `patience_s` passes without one, all hops are asked whether they live, and
        if they do, `late` is awaited, which may raise HopFailed as well. It may ask for `places`.

        Raises HopFailed.
        """

        async def look() -> None:
            await self._probe()
            await late()

        return await wait_with_watchdog(self._result(), patience_s, look)

    async def hop_progress(self) -> Mapping[PeerId, HopProgress]:
        """How far the steps have come at all hops, or at those that say so in time.

        While `receive` waits: it is what reads the hops' answers. Raises HopFailed.
        """
        self._hop_progress.clear()
        self._progress_changed.clear()
        for peer in self.chain.peers:
            await self._send_to(peer, ProgressQuery(self.id))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._failure_detector.next_timeout_s):
                await self._progress_changed.wait()
        return dict(self._hop_progress)

    def stalled_hops(self, places: Mapping[PeerId, HopProgress], still_s: float) -> tuple[PeerId, ...]:
        """The hops that the last step may hang at, likeliest first; () as long as anything moved within `still_s`."""
        lasted_s = self._stall_timer.lasted_s(places, asyncio.get_running_loop().time())
        return stalled_hops(self.chain.peers, places, self._step) if lasted_s >= still_s else ()

    async def discard_in_flight(self, epoch: int) -> None:
        """Tell every hop that steps before `epoch` are void, best effort: the next step says so too, only later."""
        for connection in self._connections.values():
            with contextlib.suppress(NetworkError):
                await connection.send(DropInFlight(self.id, epoch))

    async def close(self, tokens: Sequence[int] = ()) -> None:
        """Tell every hop, best effort: a hop that cannot be told notices when the connection goes.

        `tokens`: all that were known, for hops that keep them for the next session that begins so.
        """
        self._demux.forget(self.id)
        await self._close_hops(list(self._connections), block_hashes(tokens))

    # Repair ----------------------------------------------------------------------------------------------------------

    def mark_failed(self, peer: PeerId, cause: NetworkError) -> HopFailed:
        """Count a hop as lost for a reason that shows elsewhere."""
        return self._lose(peer, cause)

    def drain_failures(self) -> None:
        """Take in what is known of further losses without waiting for more."""
        while not self._inbox.empty():
            with contextlib.suppress(HopFailed):
                self._dispatch(self._inbox.get_nowait())

    async def repair(
        self, repair: Repair, nodes: Mapping[PeerId, NodeProfile], tokens: Sequence[int], settled: int, epoch: int
    ) -> None:
        """Go on along `repair.chain`, which mends `whole`. Every hop then holds the first `settled` of `tokens`.

        Replacements are opened with this session's id, the hops beside them are rerouted, and what a replacement lacks
        comes from the log of the hop before it, or from here. `epoch` is newer than that of all steps sent so far.
        Raises HopFailed, and may then be tried again with another repair and a newer epoch.
        """
        hops, kept = repair.chain.hops, set(repair.kept)
        legacies = kv_sources(set(hops) - kept, self.last_ready_chain, self._detached, nodes, settled)
        needed = {hop.peer for hop in kept} | {legacy.peer for legacy in legacies.values()}
        await self._close_hops([p for p in self._connections if p not in needed])
        self.chain, self.epoch = repair.chain, epoch
        fresh: dict[Hop, int] = {}
        for i, hop in enumerate(hops):
            if hop not in kept:
                last = i + 1 == len(hops) or hops[i + 1] in kept
                fresh[hop] = settled if last else 0
        held = await self._open_hops(fresh, nodes, tokens, legacies)
        fed = {hop.peer for hop in fresh if held[hop.peer] < settled}
        rerouted: list[tuple[int, Hop]] = []
        for i, hop in enumerate(hops):
            beside = (*hops[max(0, i - 1) : i], *hops[i + 1 : i + 2])
            if hop in kept and any(other not in kept for other in beside):
                rerouted.append((i, hop))
        for i, hop in rerouted:
            replay = settled if fed.intersection(leading_replacements(hops[i + 1 :], kept)) else 0
            await self._await_with_pings(
                self._send_to(hop.peer, self._reroute(i, nodes, replay)), self._limits.ping_timeout_s
            )
        await self._all_open({hop.peer for _, hop in rerouted})
        if fed.intersection(leading_replacements(hops, kept)):
            await self._replay(tokens[:settled])
        await self._close_hops([legacy.peer for legacy in legacies.values()])
        self.last_ready_chain = repair.chain
        self.failed_hops.clear()
        self._detached.clear()

    def _reroute(self, index: int, nodes: Mapping[PeerId, NodeProfile], replay: int) -> Reroute:
        return reroute_message(self.id, self.epoch, *self._neighbours(index), nodes, replay)

    async def _replay(self, tokens: Sequence[int]) -> None:
        """Feed a new first hop what the others hold already."""
        for start in range(0, len(tokens), REPLAY_ROWS):
            part = list(tokens[start : start + REPLAY_ROWS])
            step = Step(self.id, self.epoch, 0, start, len(part), sample=False, tokens=part)
            await self._await_with_pings(self._send_to(self.chain.hops[0].peer, step), self._limits.ping_timeout_s)

    # Opening ---------------------------------------------------------------------------------------------------------

    async def _open_hops(
        self,
        hops: Mapping[Hop, int],
        nodes: Mapping[PeerId, NodeProfile],
        history: Sequence[int],
        legacies: Mapping[PeerId, KvSource] | None = None,
    ) -> dict[PeerId, int]:
        """Open the session on `hops` (of the chain; with their `replay_silent_until`) and wait until all are ready.

        -> how many tokens each of them has behind it.
        """
        waiting = {hop.peer for hop in hops}
        try:
            async with asyncio.timeout(self._limits.open_timeout_s):
                async with asyncio.TaskGroup() as group:
                    for hop, onward_from in hops.items():
                        legacy = (legacies or {}).get(hop.peer)
                        group.create_task(self._open_hop(hop, onward_from, nodes, history, legacy))
                return await self._all_open(waiting)
        except TimeoutError:
            late = next(hop.peer for hop in hops if hop.peer in waiting)
            raise self._lose(late, ConnectionLost(f"node {late} did not open the session in time")) from None
        except ExceptionGroup as group_error:
            failures, others = group_error.split(HopFailed)
            if failures is None or others is not None:
                raise
            raise failures.exceptions[0] from None

    async def _open_hop(
        self,
        hop: Hop,
        onward_from: int,
        nodes: Mapping[PeerId, NodeProfile],
        history: Sequence[int],
        legacy: KvSource | None,
    ) -> None:
        before, after = self._neighbours(self.chain.hops.index(hop))
        message = open_message(self.id, self.spec, hop, before, after, nodes, history, legacy)
        message = msgspec.structs.replace(
            message, epoch=self.epoch, replay_silent_until=onward_from, block_hashes=list(self.block_hashes)
        )
        patience_s = self._limits.next_hop_dial_timeout_s if self.epoch else self._limits.dial_timeout_s
        try:
            self._connections[hop.peer] = await self._pool.get(hop.peer, nodes[hop.peer].addresses, patience_s)
        except NetworkError as error:
            raise self._lose(hop.peer, error) from error
        await self._send_to(hop.peer, message)

    def _neighbours(self, index: int) -> tuple[PeerId, PeerId]:
        """The peers before and after a hop; "" is the client."""
        peers = ("", *self.chain.peers, "")
        return peers[index], peers[index + 2]

    async def _all_open(self, waiting: set[PeerId]) -> dict[PeerId, int]:
        """Wait until all of `waiting` have answered an Open or Reroute of this epoch. -> tokens that each holds."""
        held: dict[PeerId, int] = {}
        while waiting:
            incoming = await self._await_with_pings(self._next(), self._limits.ping_timeout_s)
            opened = incoming.message
            if isinstance(opened, SessionOpened) and opened.epoch == self.epoch:
                waiting.discard(incoming.peer)
                held[incoming.peer] = opened.cached_tokens
                (self._relayed.add if opened.client_relays_next_edge else self._relayed.discard)(incoming.peer)
        return held

    # Frames ----------------------------------------------------------------------------------------------------------

    async def _result(self) -> StepResult:
        while True:
            incoming = await self._next()
            if isinstance(incoming.message, StepResult) and incoming.peer == self.chain.peers[-1]:
                return incoming.message

    async def _next(self) -> ReceivedMessage:
        """The next answer. Edges that hops could not dial are relayed on the way. Raises HopFailed."""
        while True:
            incoming = self._dispatch(await self._inbox.get())
            if incoming is None:
                continue
            step = incoming.message
            if isinstance(step, ProgressReport):
                self._hop_progress[incoming.peer] = HopProgress(step.received, step.completed, step.compute_ms)
                if self._hop_progress.keys() >= set(self.chain.peers):
                    self._progress_changed.set()
                continue
            if not isinstance(step, Step):
                return incoming
            if incoming.peer not in self._relayed:
                raise self._lose(incoming.peer, ProtocolError(f"node {incoming.peer} answered out of turn"))
            if step.epoch >= self.epoch:
                _, after = self._neighbours(self.chain.peers.index(incoming.peer))
                await self._send_to(after, step, incoming.body)

    def _dispatch(self, incoming: ReceivedMessage) -> ReceivedMessage | None:
        """None for what is none of our business: another session's node, or one that is out. Raises HopFailed."""
        if incoming.peer not in self.chain.peers:
            return None
        if incoming.error is not None:
            raise self._lose(incoming.peer, incoming.error)
        failed = incoming.message
        if not isinstance(failed, SessionFailed):
            return incoming
        if failed.epoch < self.epoch:
            return None  # from before a repair
        if not failed.unreachable_next_hop:
            self._detached[incoming.peer] = failed.kv_retained_tokens
            raise self._lose(incoming.peer, remote_error(incoming.peer, failed))
        if failed.unreachable_next_hop not in self.chain.peers:
            return None
        raise self._lose(
            failed.unreachable_next_hop, ConnectionLost(failed.detail)
        )  # it is dead, or it will publish again

    async def _send_to(self, peer: PeerId, message: AnyMessage, body: Buffer = b"") -> None:
        try:
            await self._connections[peer].send(message, body)
        except NetworkError as error:
            raise self._lose(peer, error) from error

    async def _close_hops(self, peers: Collection[PeerId], keep: Sequence[bytes] = ()) -> None:
        """These have nothing to do with this session any more."""
        leaving = [self._connections.pop(peer) for peer in peers if peer in self._connections]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):  # one that does not read must not hold us up
                await asyncio.gather(*(_notify_closed(link, self.id, keep) for link in leaving))

    # Who is alive ----------------------------------------------------------------------------------------------------

    def _lose(self, peer: PeerId, cause: NetworkError) -> HopFailed:
        self.failed_hops.setdefault(peer, cause)
        return HopFailed(peer, cause)

    async def _await_with_pings(self, work: Coroutine[Any, Any, _T], patience_s: float) -> _T:
        """Await `work`; whenever it has taken `patience_s` more, ask all hops for a sign of life.

        All of them, for one that should answer may be waiting for another. A ping is answered by a node's event loop,
        so a node that is only busy answers. Raises HopFailed.
        """
        return await wait_with_watchdog(work, patience_s, self._probe)

    async def _probe(self) -> None:
        """Raises HopFailed for one of those that are silent; `lost` has them all."""
        silent = await self._failure_detector.unresponsive(self.chain.peers)
        for peer in silent:
            self._lose(peer, ConnectionLost(f"node {peer} fell silent"))
        if silent:
            raise HopFailed(silent[0], self.failed_hops[silent[0]])


async def _notify_closed(link: MigratableLink, session: bytes, keep: Sequence[bytes]) -> None:
    with contextlib.suppress(NetworkError):
        await link.send(CloseSession(session, list(keep[:MAX_BLOCK_HASHES])))
