"""What an attacker has: the map it read, identities as many as it wants, links and sessions like any client's.

Owns how an attack is bounded in time and rate. The attacks themselves are in the modules `attack_*`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from swarm.errors import NetworkError, PeerUnreachable
from swarm.messages import (
    AnyMessage,
    CloseSession,
    DropInFlight,
    OpenSession,
    SessionFailed,
    SessionOpened,
    Step,
    StepResult,
    WireSampling,
)
from swarm.net.base.frame_stream import FramedStream
from swarm.net.base.tls_addresses import is_direct, parse
from swarm.net.security.identity import Identity
from swarm.net.transports.tls import TlsTransport


class Victim(msgspec.Struct, frozen=True):
    """An honest node, as its record says."""

    peer: str
    addresses: tuple[str, ...]
    start: int
    end: int

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of its direct listener."""
        found = next(e for a in self.addresses if is_direct(a) and (e := parse(a, self.peer)) is not None)
        return found.host, found.port


class Target(msgspec.Struct, frozen=True):
    """The swarm that is attacked, and the attacker's own address."""

    model: str
    weight_hash: str
    dtype: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    nodes: tuple[Victim, ...]
    own_address: str = "127.0.0.1"

    def serving(self, start: int) -> list[Victim]:
        return [node for node in self.nodes if node.start == start]

    @property
    def chain(self) -> list[Victim]:
        """One node for each span, in order."""
        return [self.serving(start)[0] for start in sorted({node.start for node in self.nodes})]

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype == "fp32" else 2


@dataclass(eq=False)
class Siege:
    """One attack on `target`. `run_until` and `counts` belong to its run; `stack` closes what it opened."""

    target: Target
    stack: contextlib.AsyncExitStack
    rng: random.Random = field(default_factory=lambda: random.Random(18))
    run_until: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    _background: set[asyncio.Task[None]] = field(default_factory=set)
    _links: list[FramedStream] = field(default_factory=list)

    @property
    def running(self) -> bool:
        return time.monotonic() < self.run_until

    async def over(self) -> None:
        """Wait until the attack's time is over."""
        await asyncio.sleep(max(0.0, self.run_until - time.monotonic()))

    async def transport(self, identity: Identity | None = None) -> TlsTransport:
        transport = await TlsTransport.start(identity or Identity.generate())
        self.stack.push_async_callback(transport.close)
        return transport

    async def link(self, victim: Victim, transport: TlsTransport | None = None, read: bool = True) -> FramedStream:
        """A connection; what comes back is read and thrown away if `read`. Raises NetworkError."""
        transport = transport or await self.transport()
        stream = await transport.dial(victim.peer, victim.addresses)
        self._links.append(stream)
        if read:
            self.start(self.drain(stream))
        return stream

    async def drain(self, stream: FramedStream) -> None:
        with contextlib.suppress(NetworkError):
            while True:
                message, _ = await stream.receive()
                self.counts[f"got {type(message).__name__}"] += 1

    def start(self, work: Awaitable[None]) -> None:
        async def guarded() -> None:
            with contextlib.suppress(NetworkError, OSError):
                await work

        task = asyncio.get_running_loop().create_task(guarded())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close_links(self) -> None:
        """Between two attacks nothing is left of the first."""
        links, self._links = self._links, []
        for link in links:
            with contextlib.suppress(NetworkError, OSError):
                await link.close()

    async def close(self) -> None:
        for task in list(self._background):
            task.cancel()
        await self.stack.aclose()

    async def all_of(self, works: Iterable[Awaitable[None]]) -> None:
        """Side by side; one that fails ends no other."""

        async def guarded(work: Awaitable[None]) -> None:
            try:
                await work
            except (NetworkError, OSError, TimeoutError) as error:
                self.counts[f"ended by {type(error).__name__}"] += 1

        await asyncio.gather(*(guarded(work) for work in works))

    async def flood(
        self, victim: Victim, make: Callable[[], tuple[AnyMessage, bytes] | AnyMessage], per_s: float = 2000.0
    ) -> None:
        """Send what `make` gives to one node over and over, at most `per_s`; one that is cut off comes again as
        somebody else."""
        while self.running:
            try:
                stream = await self.link(victim)
                begun, sent = time.monotonic(), 0
                while self.running:
                    made = make()
                    await stream.send(*(made if isinstance(made, tuple) else (made,)))
                    self.counts["sent"] += 1
                    sent += 1
                    ahead_s = sent / per_s - (time.monotonic() - begun)
                    await asyncio.sleep(max(0.0, ahead_s))
            except NetworkError:
                self.counts["cut off"] += 1
                await asyncio.sleep(0.05)

    def open_message(self, victim: Victim, session: bytes, **changes: object) -> OpenSession:
        """An Open that the node accepts: its whole span, the attacker before it and nobody who can be reached after."""
        target = self.target
        tail = victim.end == target.num_layers
        message = OpenSession(
            session,
            target.model,
            target.weight_hash,
            target.dtype,
            victim.start,
            victim.end,
            max_tokens=256,
            downstream="" if tail else target.chain[-1].peer,
            sampling=WireSampling() if tail else None,
        )
        return msgspec.structs.replace(message, **changes)


async def raw_write(stream: FramedStream, data: bytes) -> None:
    """Bytes that need not be a frame. Raises ConnectionLost."""
    await stream._ready()
    stream._write(data)


def stop_reading(stream: FramedStream) -> None:
    """From now on nothing that the other side sends is taken from the socket."""
    stream._pause_reading()


def session_id() -> bytes:
    return os.urandom(16)


@dataclass(eq=False)
class HostileClient:
    """One identity with one link to each node, as an honest client has; replies go to the session that they name."""

    siege: Siege
    transport: TlsTransport
    chains: dict[bytes, HostileChain] = field(default_factory=dict)
    _links: dict[str, asyncio.Task[FramedStream]] = field(default_factory=dict)

    async def link(self, victim: Victim) -> FramedStream:
        """Raises NetworkError."""
        known = self._links.get(victim.peer)
        if known is None or (known.done() and (known.exception() or known.result()._end is not None)):
            known = asyncio.get_running_loop().create_task(self._connect(victim))
            self._links[victim.peer] = known
        return await asyncio.shield(known)

    async def _connect(self, victim: Victim) -> FramedStream:
        stream = await self.siege.link(victim, self.transport, read=False)
        self.siege.start(self._read(victim, stream))
        return stream

    async def _read(self, victim: Victim, stream: FramedStream) -> None:
        try:
            while True:
                message, _ = await stream.receive()
                self.siege.counts[f"got {type(message).__name__}"] += 1
                chain = self.chains.get(getattr(message, "session", b""))
                if chain is not None:
                    chain.on_reply(message)
        finally:
            self._links.pop(victim.peer, None)
            for chain in list(self.chains.values()):
                chain.on_reply(None)


@dataclass(eq=False)
class HostileChain:
    """A session through every span of the swarm, as a client's: steps go to its first hop, `window` at a time."""

    client: HostileClient
    hops: Sequence[Victim]
    window: int = 16
    id: bytes = field(default_factory=session_id)
    step: int = 0
    failed: bool = False

    async def open(self, max_tokens: int, sampling: WireSampling | None = None) -> None:
        """Raises NetworkError, TimeoutError."""
        self._may_send = asyncio.Semaphore(self.window)
        self._opened = asyncio.Semaphore(0)
        self.client.chains[self.id] = self
        hops = list(self.hops)
        for i in reversed(range(len(hops))):
            after = hops[i + 1] if i + 1 < len(hops) else None
            opening = self.client.siege.open_message(
                hops[i],
                self.id,
                max_tokens=max_tokens,
                upstream=hops[i - 1].peer if i else "",
                downstream=after.peer if after else "",
                sampling=(sampling or WireSampling()) if after is None else None,
            )
            await (await self.client.link(hops[i])).send(opening)
            async with asyncio.timeout(10.0):
                await self._opened.acquire()
            if self.failed:
                raise PeerUnreachable("refused")

    def on_reply(self, message: AnyMessage | None) -> None:
        """None: a link is lost."""
        if isinstance(message, SessionOpened):
            self._opened.release()
        elif isinstance(message, StepResult):
            self._may_send.release()
        elif message is None or isinstance(message, SessionFailed):
            self.failed = True
            self._opened.release()
            self._may_send.release()

    async def send(self, committed: int, causal: int, tree: int) -> None:
        """A step of `causal` rows and `tree` draft-tree nodes below the last of them. Raises NetworkError."""
        try:
            async with asyncio.timeout(5.0):
                await self._may_send.acquire()
        except TimeoutError:
            self.failed = True
        if self.failed:
            return
        siege = self.client.siege
        first = self.step * tree % 2048
        tokens = [siege.rng.randrange(siege.target.vocab_size) for _ in range(causal + tree)]
        slots = list(range(first, first + tree))
        message = Step(self.id, 0, self.step, committed, causal, tokens=tokens, parents=[-1] * tree, slots=slots)
        await (await self.client.link(self.hops[0])).send(message)
        if tree:
            for hop in self.hops:
                await (await self.client.link(hop)).send(DropInFlight(self.id, 0, slots))
        self.step += 1
        siege.counts["steps"] += 1
        siege.counts["rows"] += causal + tree

    async def close(self) -> None:
        self.client.chains.pop(self.id, None)
        for hop in self.hops:
            with contextlib.suppress(NetworkError):
                await (await self.client.link(hop)).send(CloseSession(self.id))
