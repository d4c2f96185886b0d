"""The Transport protocol: how frames reach a peer whose identity is proven. Its implementations are
`daemon_streams`, `direct`, `reach` (both of them), `memory` and the wrappers `shaped` and `throttle`.

Owns what a connection promises; knows neither what the messages mean nor how peers are found.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, runtime_checkable

from swarm.codec import Buffer
from swarm.messages import AnyMessage
from swarm.types import PeerId


class Connection(Protocol):
    """A duplex, ordered, reliable stream of frames to one authenticated peer. Many sessions share one connection."""

    @property
    def peer(self) -> PeerId:
        """The other side, proven by its key before any frame is read."""
        ...

    async def send(self, message: AnyMessage, body: Buffer = b"") -> None:
        """Queue one frame and wait while the link is backed up. Frames of concurrent senders never interleave, and a
        send that is cancelled still sends its frame whole or not at all. `body` may be read after this returns, so
        leave it unchanged.

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
"""(a connection that was dialled, a better one to the same peer), which it may use instead or must close."""


@runtime_checkable
class UpgradingTransport(Protocol):
    """A transport that goes on looking for a better way to the peers it has dialled."""

    def on_upgrade(self, found: OnUpgrade) -> None:
        """Have `found` awaited, in a task of the transport's, for every better connection."""
        ...


class Directory(Protocol):
    """The live map of who serves what. `net.directory` keeps it in the DHT; `net.memory` in a dictionary for tests."""

    async def publish(self, record: bytes, model: str, expires_at: float) -> None:
        """Store our signed record under `swarm/<model>/nodes`, subkey our peer id. Raises NetworkError."""
        ...

    async def withdraw(self, model: str) -> None:
        """Replace our record by one that expires at once."""
        ...

    async def read(self, model: str) -> dict[PeerId, bytes]:
        """All live records of a model: peer id -> record bytes, not yet validated. Raises NetworkError."""
        ...
