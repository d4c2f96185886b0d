"""One session opened on every hop of one chain. Owns its id, its connections and the edges the client relays.

Knows nothing of tokens to come: `driver` decides what to send, this carries it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarm.codec import Buffer
from swarm.config import Limits
from swarm.errors import ConnectionLost, NetworkError, NodeBusy, PeerUnreachable, ProtocolError, RemoteError, WrongModel
from swarm.messages import AnyMessage, Close, Failed, Open, Opened, Result, Step, WireSampling
from swarm.net.link import Link
from swarm.net.pool import ConnectionPool
from swarm.plan.session import SendStep
from swarm.types import Chain, Hop, NodeProfile, PeerId, Sampling

MAX_UNREAD = 256  # frames waiting in one session's queue; its window of steps is far smaller


class HopFailed(NetworkError):
    """One hop of the chain cannot go on; `peer` is to be left out of the next one and `cause` says why."""

    code = "hop_failed"

    def __init__(self, peer: PeerId, cause: NetworkError) -> None:
        super().__init__(str(cause))
        self.peer = peer
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Incoming:
    """A frame for one session, or (without a message) the news that the connection to `peer` is gone."""

    peer: PeerId
    message: AnyMessage | None
    body: Buffer = b""
    error: NetworkError | None = None


class Inboxes:
    """Sorts the frames of all connections into the queues of the sessions they belong to."""

    def __init__(self) -> None:
        self._queues: dict[bytes, asyncio.Queue[Incoming]] = {}

    def register(self, session: bytes) -> asyncio.Queue[Incoming]:
        return self._queues.setdefault(session, asyncio.Queue(MAX_UNREAD))

    def forget(self, session: bytes) -> None:
        self._queues.pop(session, None)

    async def on_frame(self, connection: Link, message: AnyMessage, body: memoryview) -> None:
        if not isinstance(message, Opened | Failed | Result | Step):
            raise ProtocolError(f"a node sent a client a {type(message).__name__}")
        queue = self._queues.get(message.session)
        if queue is None:
            return  # late news of a session that is closed
        if queue.full():
            raise ProtocolError(f"a node sent {MAX_UNREAD} frames that nobody asked for")
        queue.put_nowait(Incoming(connection.peer, message, body))

    async def on_lost(self, connection: Link, error: NetworkError) -> None:
        for queue in self._queues.values():
            while queue.full():
                queue.get_nowait()  # the loss matters more than what came before it
            queue.put_nowait(Incoming(connection.peer, None, error=error))


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What every hop is told when the session opens."""

    model: str
    weight_hash: str
    dtype: str
    max_tokens: int
    sampling: Sampling


@dataclass(slots=True)
class ChainSession:
    """Use `await ChainSession.open(...)`; then `send`, `receive`, `close`."""

    id: bytes
    chain: Chain
    _pool: ConnectionPool
    _inboxes: Inboxes
    _inbox: asyncio.Queue[Incoming]
    _connections: dict[PeerId, Link] = field(default_factory=dict)
    _relayed: set[PeerId] = field(default_factory=set)

    @classmethod
    async def open(
        cls,
        chain: Chain,
        nodes: Mapping[PeerId, NodeProfile],
        spec: SessionSpec,
        history: Sequence[int],
        pool: ConnectionPool,
        inboxes: Inboxes,
        limits: Limits,
    ) -> ChainSession:
        """Dial every hop, open the session on all of them at once and wait until all are ready. Raises HopFailed."""
        session = os.urandom(16)
        self = cls(session, chain, pool, inboxes, inboxes.register(session))
        try:
            async with asyncio.timeout(limits.open_timeout_s):
                await self._open_all(nodes, spec, history)
                waiting = set(chain.peers)
                while waiting:
                    waiting.discard(await self._opened())
        except TimeoutError:
            late = next((p for p in chain.peers if p not in self._connections), chain.peers[-1])
            await self.close()
            raise HopFailed(late, ConnectionLost(f"node {late} did not open the session in time")) from None
        except BaseException:
            await self.close()
            raise
        return self

    async def _open_all(self, nodes: Mapping[PeerId, NodeProfile], spec: SessionSpec, history: Sequence[int]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for i, hop in enumerate(self.chain.hops):
                    group.create_task(self._open_hop(i, hop, nodes, spec, history))
        except ExceptionGroup as group_error:
            failures, others = group_error.split(HopFailed)
            if failures is None or others is not None:
                raise
            raise failures.exceptions[0] from None

    async def _open_hop(
        self, index: int, hop: Hop, nodes: Mapping[PeerId, NodeProfile], spec: SessionSpec, history: Sequence[int]
    ) -> None:
        hops = self.chain.hops
        after = hops[index + 1].peer if index + 1 < len(hops) else ""
        tail = not after
        message = Open(
            session=self.id,
            model=spec.model,
            weight_hash=spec.weight_hash,
            dtype=spec.dtype,
            start=hop.start,
            end=hop.end,
            max_tokens=spec.max_tokens,
            upstream=hops[index - 1].peer if index else "",
            downstream=after,
            downstream_addresses=list(nodes[after].addresses) if after else [],
            sampling=WireSampling.of(spec.sampling) if tail else None,
            history=list(history) if tail and spec.sampling.repetition_penalty != 1.0 else [],
        )
        try:
            connection = await self._pool.get(hop.peer, nodes[hop.peer].addresses)
            self._connections[hop.peer] = connection
            await connection.send(message)
        except NetworkError as error:
            raise HopFailed(hop.peer, error) from error

    async def _opened(self) -> PeerId:
        """The next hop that is ready."""
        incoming = await self._receive()
        if not isinstance(incoming.message, Opened):
            raise HopFailed(incoming.peer, ProtocolError(f"node {incoming.peer} answered out of turn"))
        if incoming.message.relay:
            self._relayed.add(incoming.peer)
        return incoming.peer

    async def send(self, action: SendStep) -> None:
        """Send a step to the first hop. Raises HopFailed."""
        step = Step(
            session=self.id,
            epoch=action.epoch,
            step=action.step,
            base=action.base,
            line=len(action.tokens),
            sample=action.sample,
            tokens=list(action.tokens),
        )
        await self._send_to(self.chain.hops[0].peer, step)

    async def receive(self) -> Result:
        """The tail's next result; relays the edges that hops could not dial. Raises HopFailed."""
        while True:
            incoming = await self._receive()
            match incoming.message:
                case Result() as result if incoming.peer == self.chain.hops[-1].peer:
                    return result
                case Step() as step if incoming.peer in self._relayed:
                    after = self.chain.peers.index(incoming.peer) + 1
                    await self._send_to(self.chain.peers[after], step, incoming.body)
                case _:
                    raise HopFailed(incoming.peer, ProtocolError(f"node {incoming.peer} answered out of turn"))

    async def close(self) -> None:
        """Tell every hop, best effort: a hop that cannot be told notices when the connection goes."""
        self._inboxes.forget(self.id)
        for connection in self._connections.values():
            with contextlib.suppress(NetworkError):
                await connection.send(Close(self.id))

    def _blamed(self, peer: PeerId, failed: Failed) -> PeerId:
        """Who is to be left out of the next chain: a hop that lost its connection speaks of the one after it."""
        after = self.chain.peers.index(peer) + 1
        if failed.error in (ConnectionLost.code, PeerUnreachable.code) and after < len(self.chain):
            return self.chain.peers[after]
        return peer

    async def _send_to(self, peer: PeerId, step: Step, body: Buffer = b"") -> None:
        try:
            await self._connections[peer].send(step, body)
        except NetworkError as error:
            raise HopFailed(peer, error) from error

    async def _receive(self) -> Incoming:
        while True:
            incoming = await self._inbox.get()
            if incoming.peer not in self.chain.peers:
                continue  # another session's node; none of our business
            if incoming.error is not None:
                raise HopFailed(incoming.peer, incoming.error)
            if isinstance(incoming.message, Failed):
                raise HopFailed(
                    self._blamed(incoming.peer, incoming.message), _remote_error(incoming.peer, incoming.message)
                )
            return incoming


def _remote_error(peer: PeerId, failed: Failed) -> NetworkError:
    if failed.error == NodeBusy.code:
        return NodeBusy(failed.detail, peer, failed.retry_after_s)
    if failed.error == WrongModel.code:
        return WrongModel(failed.detail)
    return RemoteError(failed.detail, failed.error, peer)
