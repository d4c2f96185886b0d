"""A whole network inside one event loop, for tests: an in-memory transport, and a directory in a dictionary.

Owns delay, rate, loss, partitions and crashes of peers. All of it runs on `loop.time()` and one seeded generator, so a
run under a virtual clock is deterministic. Frames go through the real codec and limits. Knows no sockets.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm import codec
from swarm.codec import DEFAULT_LIMITS, Buffer, FrameLimits
from swarm.errors import ConnectionLost, NetworkError, PeerUnreachable
from swarm.messages import AnyMessage
from swarm.net.base.frame_stream import POLICY, Guard
from swarm.net.base.tasks import TaskSet
from swarm.net.base.transport import Handler
from swarm.types import PeerId

PACKET = 1400  # bytes; loss is a chance per packet
MIN_RETRANSMIT_S = 0.01


@dataclass(frozen=True, slots=True)
class LinkModel:
    """One direction between two peers.

    `delay_s`: one way. `rate`: bytes a second. `loss`: the chance that a packet is lost; the stream is reliable, so a
    loss costs its frame, and all behind it, one more round trip.
    """

    delay_s: float = 0.0
    rate: float = math.inf
    loss: float = 0.0


_Frame = tuple[bytes, memoryview]  # prefix and header, body


class _Pipe:
    """One direction of one connection: frames in flight, then frames waiting for the reader."""

    def __init__(self, network: MemoryNetwork, source: PeerId, target: PeerId) -> None:
        self._network = network
        self._ends = (source, target)
        self._in_flight: deque[_Frame | None] = deque()  # None ends the stream
        self._arrived: deque[_Frame] = deque()
        self._stalled = 0  # of `_in_flight`: would have arrived, but for the partition
        self._unread = 0  # bytes
        self._last_arrival = 0.0
        self._changed = asyncio.Event()
        self._finished = False  # the sender has ended the stream: nothing more is sent
        self.ended = False  # the reader has seen the end: nothing more arrives
        self.on_end: Callable[[], None] = lambda: None

    async def put(self, frame: _Frame) -> None:
        """Send one frame; waits while the window is full. Raises ConnectionLost."""
        size = len(frame[0]) + len(frame[1])
        while not self._finished and self._unread and self._unread + size > self._network.window:
            await self._changed.wait()
        if self._finished:
            raise ConnectionLost(f"the connection to {self._ends[1]} is closed")
        self._unread += size
        self._network.count(self._ends, size)
        self._send(frame, size)

    async def get(self) -> _Frame:
        """The next frame. Raises ConnectionLost once the stream has ended and all that had arrived is read."""
        while not self._arrived:
            if self.ended:
                raise ConnectionLost(f"{self._ends[0]} closed the connection")
            await self._changed.wait()
        frame = self._arrived.popleft()
        self._unread -= len(frame[0]) + len(frame[1])
        self._notify()
        return frame

    def finish(self) -> None:
        """End the stream behind the frames in flight."""
        if not self._finished:
            self._finished = True
            self._send(None, 0)
            self._notify()

    def drop_in_flight(self) -> None:
        """The sender has crashed: frames in flight are lost. A later `abort` notifies the reader."""
        self._finished = True
        self._in_flight.clear()
        self._stalled = 0

    def abort(self) -> None:
        """Drop the frames in flight; both ends see ConnectionLost, the reader after what had arrived."""
        self.drop_in_flight()
        self.ended = True
        self._notify()

    def discard(self) -> None:
        """The reader is gone: drop what had arrived as well."""
        self.abort()
        self._arrived.clear()

    def resume(self) -> None:
        """The partition has healed: deliver what it held back, in order."""
        stalled, self._stalled = self._stalled, 0
        for _ in range(stalled):
            self._arrive()

    def _send(self, frame: _Frame | None, size: int) -> None:
        when = max(self._network.arrival(self._ends, size), self._last_arrival)
        self._last_arrival = when
        self._in_flight.append(frame)
        asyncio.get_running_loop().call_at(when, self._arrive)

    def _arrive(self) -> None:
        if self._stalled or self._network.cut(*self._ends):
            self._stalled += 1
            return
        if not self._in_flight:  # aborted meanwhile
            return
        frame = self._in_flight.popleft()
        if frame is None:
            self.ended = True
            self.on_end()
        else:
            self._arrived.append(frame)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class MemoryConnection:
    """One end of a connection; see `transport.Connection`."""

    def __init__(self, peer: PeerId, inbound: _Pipe, outbound: _Pipe, limits: FrameLimits, remote: str = "") -> None:
        self._peer = peer
        self.remote = remote
        self._allows: Guard = lambda header, body: True
        self._in, self._out = inbound, outbound
        self._limits = limits
        self._sending = asyncio.Lock()
        inbound.on_end = outbound.abort

    @property
    def peer(self) -> PeerId:
        return self._peer

    async def send(self, message: AnyMessage, body: Buffer = b"") -> None:
        header, body = codec.encode(message, body)
        await self.send_raw(header, body)

    async def send_raw(self, header: bytes, body: Buffer = b"") -> None:
        """A frame as bytes, prefix included, unchecked: for tests of malicious peers."""
        async with self._sending:
            await self._out.put((header, memoryview(bytes(body))))

    async def receive(self) -> tuple[AnyMessage, memoryview]:
        header, body = await self._in.get()
        try:
            if not self._allows(len(header), len(body)):
                raise ConnectionLost(f"a frame that is too large for {self._peer}")
            codec.parse_prefix(header[: codec.PREFIX.size], self._limits)
            return codec.decode(header[codec.PREFIX.size :]), body
        except NetworkError:
            await self.close()
            raise

    def guard(self, allows: Guard) -> None:
        self._allows = lambda header, body: max(header, body) <= POLICY.guarded_frame or allows(header, body)

    async def close(self) -> None:
        self._out.finish()
        self._in.discard()

    def abort(self) -> None:
        """As when the process of one end crashes."""
        self._out.abort()
        self._in.abort()


class MemoryTransport:
    """One peer's endpoint in a `MemoryNetwork`; see `transport.Transport`."""

    def __init__(self, network: MemoryNetwork, peer: PeerId, limits: FrameLimits, dial_timeout_s: float) -> None:
        self._network = network
        self._peer = peer
        self._limits = limits
        self._dial_timeout_s = dial_timeout_s
        self._handler: Handler | None = None
        self._tasks = TaskSet(f"memory transport {peer}")
        self.closed = False

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self._peer}/p2p/{self._peer}",)

    async def dial(self, peer: PeerId, addresses: Sequence[str] = ()) -> MemoryConnection:
        if self.closed:
            raise PeerUnreachable("this transport is closed")
        if self._network.cut(self._peer, peer):
            await asyncio.sleep(self._dial_timeout_s)
            raise PeerUnreachable(f"{peer} did not answer within {self._dial_timeout_s:g} s")
        await asyncio.sleep(self._network.round_trip_s(self._peer, peer))
        target = self._network.alive(peer)
        if self.closed or target is None or target._handler is None:
            raise PeerUnreachable(f"nobody listens as {peer}")
        there, back = _Pipe(self._network, self._peer, peer), _Pipe(self._network, peer, self._peer)
        near = MemoryConnection(peer, back, there, self._limits, self._network.hosts[peer])
        far = MemoryConnection(self._peer, there, back, target._limits, self._network.hosts[self._peer])
        self._network.connected(near, (self._peer, peer), (there, back))
        target._tasks.start(_serve(target._handler, far), f"connection from {self._peer}")
        return near

    async def serve(self, handler: Handler) -> None:
        self._handler = handler

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._network.disconnect(self._peer)
        await self._tasks.close()


async def _serve(handler: Handler, connection: MemoryConnection) -> None:
    try:
        await handler(connection)
    finally:
        await connection.close()


class MemoryDirectory:
    """See `transport.Directory`. Records are visible to all at once and disappear when they expire."""

    def __init__(self, network: MemoryNetwork, peer: PeerId) -> None:
        self._network = network
        self._peer = peer

    async def publish(self, record: bytes, model: str, expires_at: float) -> None:
        self._network.store(self._peer, model, record, expires_at)

    async def read(self, model: str) -> dict[PeerId, bytes]:
        return self._network.load(self._peer, model)


class MemoryNetwork:
    """The peers, the links between them and the directory they share.

    `seed` decides every loss. `clock` is the wall clock that records expire by. `window`: bytes that one direction of a
    connection takes, sent and not yet read, before its sender waits.
    """

    def __init__(
        self,
        seed: int = 0,
        link: LinkModel | None = None,
        clock: Callable[[], float] = time.time,
        window: int = 4 << 20,
    ) -> None:
        self.window = window
        self.hosts: defaultdict[PeerId, str] = defaultdict(str)  # the IP addresses that peers are seen at
        self.sent: Counter[tuple[PeerId, PeerId]] = Counter()  # bytes, by (from, to)
        self.frames: Counter[tuple[PeerId, PeerId]] = Counter()
        self._default = link or LinkModel()
        self._clock = clock
        self._random = random.Random(seed)
        self._links: dict[tuple[PeerId, PeerId], LinkModel] = {}
        self._busy_until: dict[tuple[PeerId, PeerId], float] = {}
        self._transports: dict[PeerId, MemoryTransport] = {}
        self._pipes: dict[MemoryConnection, tuple[tuple[PeerId, PeerId], tuple[_Pipe, _Pipe]]] = {}
        self._cuts: set[frozenset[PeerId]] = set()
        self._dark: set[PeerId] = set()
        self._records: dict[str, dict[PeerId, tuple[bytes, float]]] = {}

    def transport(
        self, peer: PeerId, limits: FrameLimits = DEFAULT_LIMITS, dial_timeout_s: float = 10.0
    ) -> MemoryTransport:
        """A peer's endpoint; again, after a crash, for its restart, which resets the connections that it had before."""
        if peer in self._dark:
            self._dark.discard(peer)
            self.kill(peer)
        transport = MemoryTransport(self, peer, limits, dial_timeout_s)
        self._transports[peer] = transport
        return transport

    def directory(self, peer: PeerId) -> MemoryDirectory:
        return MemoryDirectory(self, peer)

    def set_link(self, a: PeerId, b: PeerId, link: LinkModel, both: bool = True) -> None:
        """The link of frames from `a` to `b` from now on, and of those from `b` to `a` if `both`."""
        self._links[a, b] = link
        if both:
            self._links[b, a] = link

    def kill(self, peer: PeerId, silent: bool = False) -> None:
        """The peer's process crashes: its connections break, which the others see after the link's delay.

        `silent`: its machine crashes, and no connection is reset.
        """
        if silent:
            self._dark.add(peer)
            return
        transport = self._transports.pop(peer, None)
        if transport is not None:
            transport.closed = True
        loop = asyncio.get_running_loop()
        for connection, (ends, pipes) in self._pipes.items():
            if peer in ends:
                outbound, other = (pipes[0], ends[1]) if ends[0] == peer else (pipes[1], ends[0])
                outbound.drop_in_flight()
                loop.call_later(self._link(peer, other).delay_s, connection.abort)

    def partition(self, a: PeerId, b: PeerId) -> None:
        """Nothing passes between the two, either way, until `heal`. Frames wait, as on a stream that retransmits."""
        self._cuts.add(frozenset((a, b)))

    def heal(self, a: PeerId, b: PeerId) -> None:
        self._cuts.discard(frozenset((a, b)))
        for ends, pipes in list(self._pipes.values()):
            if set(ends) == {a, b}:
                for pipe in pipes:
                    pipe.resume()

    def cut(self, a: PeerId, b: PeerId) -> bool:
        return frozenset((a, b)) in self._cuts or a in self._dark or b in self._dark

    def alive(self, peer: PeerId) -> MemoryTransport | None:
        transport = self._transports.get(peer)
        return None if transport is None or transport.closed else transport

    def round_trip_s(self, a: PeerId, b: PeerId) -> float:
        return self._link(a, b).delay_s + self._link(b, a).delay_s

    def connected(self, connection: MemoryConnection, ends: tuple[PeerId, PeerId], pipes: tuple[_Pipe, _Pipe]) -> None:
        self._forget_ended()
        self._pipes[connection] = (ends, pipes)

    def disconnect(self, peer: PeerId) -> None:
        """The peer's transport is closed: end its streams behind the frames in flight."""
        for ends, pipes in self._pipes.values():
            for end, inbound, outbound in ((0, pipes[1], pipes[0]), (1, pipes[0], pipes[1])):
                if ends[end] == peer:
                    outbound.finish()
                    inbound.discard()
        self._transports.pop(peer, None)

    def count(self, ends: tuple[PeerId, PeerId], size: int) -> None:
        self.sent[ends] += size
        self.frames[ends] += 1

    def arrival(self, ends: tuple[PeerId, PeerId], size: int) -> float:
        """The loop time at which `size` bytes sent now arrive: after the link's queue, rate, delay and losses."""
        link = self._link(*ends)
        departed = max(asyncio.get_running_loop().time(), self._busy_until.get(ends, 0.0)) + size / link.rate
        self._busy_until[ends] = departed
        arrival = departed + link.delay_s
        if link.loss > 0.0:
            chance = 1.0 - (1.0 - min(link.loss, 0.99)) ** math.ceil(max(size, 1) / PACKET)
            again = max(self.round_trip_s(*ends), MIN_RETRANSMIT_S)
            for _ in itertools.takewhile(lambda _: self._random.random() < chance, range(16)):
                arrival += again
        return arrival

    def store(self, peer: PeerId, model: str, record: bytes, expires_at: float) -> None:
        self._reachable(peer)
        self._records.setdefault(model, {})[peer] = (record, expires_at)

    def load(self, peer: PeerId, model: str) -> dict[PeerId, bytes]:
        self._reachable(peer)
        now = self._clock()
        live = {p: item for p, item in self._records.get(model, {}).items() if item[1] > now}
        self._records[model] = live
        return {p: record for p, (record, _) in sorted(live.items())}

    def _reachable(self, peer: PeerId) -> None:
        if peer in self._dark:
            raise NetworkError("the directory cannot be reached")

    def _link(self, a: PeerId, b: PeerId) -> LinkModel:
        return self._links.get((a, b), self._default)

    def _forget_ended(self) -> None:
        for connection, (_, pipes) in list(self._pipes.items()):
            if all(pipe.ended for pipe in pipes):
                del self._pipes[connection]
