"""The Transport protocol: frames to and from a peer whose identity is authenticated. Implementations: `tls`,
`libp2p_streams`, `multi` (both of them) and `testing.memory_network`; wrappers: `rate_limit`, `testing.emulated_link`.

Owns the contract of a connection and the policy that all transports share; knows neither what the messages mean nor how
peers are found.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from swarm.codec import Buffer
from swarm.messages import AnyMessage
from swarm.net.base.half_open import HandshakePolicy
from swarm.types import PeerId


@dataclass(frozen=True, slots=True)
class TransportPolicy:
    """Limits of one transport's connections."""

    max_connections: int = 256  # dialled and accepted: sockets and buffers against peers served at once
    handshake_timeout_s: float = 5.0  # each of TLS and the preamble, when we dial
    flush_timeout_s: float = 0.5  # for what is buffered when the transport closes: last frames against a quick exit
    max_parallel_dials: int = 4  # addresses of one peer, all at once
    handshakes: HandshakePolicy = field(default_factory=HandshakePolicy)  # of those who connect to us


class Connection(Protocol):
    """A duplex, ordered, reliable stream of frames to one authenticated peer. Many sessions share one connection."""

    @property
    def peer(self) -> PeerId:
        """The other side, authenticated by its key before any frame is read."""
        ...

    @property
    def remote(self) -> str:
        """The IP address that the other side was seen at; "" behind a relay, or where there are none."""
        ...

    async def send(self, message: AnyMessage, body: Buffer = b"") -> None:
        """Queue one frame and wait while the link is congested. Frames of concurrent senders never interleave, and a
        send that is cancelled still sends its frame whole or not at all. `body` may be read after this returns: do not
        change it.

        Raises ConnectionLost.
        """
        ...

    async def receive(self) -> tuple[AnyMessage, memoryview]:
        """The next frame: (message, body). One reader at a time.

        Raises ConnectionLost at the end of the stream and ProtocolError (after which the connection is closed) on a
        frame that is malformed or over the limits.
        """
        ...

    async def close(self) -> None:
        """Idempotent. Both sides' `receive` then raise ConnectionLost."""
        ...

    def guard(self, allows: Callable[[int, int], bool]) -> None:
        """Buffer little of what comes, and ask `allows(bytes of the header, bytes of the body)` before a frame that is
        not small. If it says no, `receive` raises ConnectionLost: a race may explain it.
        """
        ...

    def abort(self) -> None:
        """Close at once, without sending what is buffered."""
        ...


Handler = Callable[[Connection], Awaitable[None]]
"""Runs one accepted connection to its end, in a task that the transport owns and cancels at `close`."""


class Transport(Protocol):
    """One endpoint of the network under one identity."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs others can dial, each ending in `/p2p/<peer id>`."""
        ...

    async def dial(self, peer: PeerId, addresses: Sequence[str] = ()) -> Connection:
        """A new connection. Raises PeerUnreachable."""
        ...

    async def serve(self, handler: Handler) -> None:
        """Accept connections from now on. At most one handler."""
        ...

    async def close(self) -> None:
        """Close every connection, end every handler, release every port and child process. Idempotent."""
        ...


OnUpgrade = Callable[[Connection, Connection], Awaitable[None]]
"""(a connection that was dialled, a better one to the same peer): the callback uses the second one or closes it."""


@runtime_checkable
class UpgradingTransport(Protocol):
    """A transport that keeps trying for a better connection to the peers it has dialled."""

    def on_upgrade(self, callback: OnUpgrade) -> None:
        """Have `callback` awaited, in a task of the transport's, for every better connection."""
        ...


class Directory(Protocol):
    """The live records of who serves what: in the DHT (`dht.directory`), in a dict for tests (`testing`)."""

    async def publish(self, record: bytes, model: str, expires_at: float) -> None:
        """Store our signed record under `swarm/<model>/nodes`, subkey our peer id. Raises NetworkError."""
        ...

    async def read(self, model: str) -> dict[PeerId, bytes]:
        """All live records of a model: peer id -> record bytes, not yet validated. Raises NetworkError."""
        ...
