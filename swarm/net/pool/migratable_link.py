"""A link to a peer as its sessions see it, while the connection underneath may change (QUIC: connection migration).

Owns the two paths of a path switch and which frames go on which. No frame is lost or reordered, and no sender pauses:

    dialler   sends PathSwitch on the new path, then on the old one; all it sends later goes on the new path
    acceptor  having read PathSwitch on both, sends it on the old path; all it sends later goes on the new path
    both      read the old path up to its PathSwitch, then the new one

Knows neither why a link migrates nor who reads it (`connection_pool`).
"""

from __future__ import annotations

import asyncio
import secrets

from swarm.codec import Buffer
from swarm.errors import ConnectionLost, NetworkError, ProtocolError
from swarm.messages import AnyMessage, PathSwitch
from swarm.net.base.transport import Connection
from swarm.types import PeerId


class MigratableLink:
    """Made by the pool for each connection, dialled (`outgoing`) or accepted. Sessions send on it."""

    def __init__(self, connection: Connection, outgoing: bool) -> None:
        self.peer: PeerId = connection.peer
        self.outgoing = outgoing
        self.reason: NetworkError | None = None  # why it was closed, if from this side
        self.ended = asyncio.Event()  # set by the pool when its reader has ended
        self._in = self._out = connection
        self._switching: tuple[int, Connection] | None = None  # of a dialler that waits for the acceptor's PathSwitch

    @property
    def path(self) -> Connection:
        """The connection that frames are sent on now."""
        return self._out

    @property
    def remote(self) -> str:
        """See `transport.Connection.remote`."""
        return self._out.remote

    async def send(self, message: AnyMessage, body: Buffer = b"") -> None:
        """See `transport.Connection.send`."""
        await self._out.send(message, body)

    async def receive(self) -> tuple[AnyMessage, memoryview]:
        """See `transport.Connection.receive`. An acceptor's PathSwitch is handled here, a dialler's is returned."""
        while True:
            message, body = await self._in.receive()
            if not (self.outgoing and isinstance(message, PathSwitch)):
                return message, body
            await self._follow(message.nonce)

    async def close(self, reason: NetworkError | None = None) -> None:
        """Idempotent; the first `reason` is kept."""
        self.reason = self.reason or reason
        for path in self._paths():
            await path.close()

    def abort(self, reason: NetworkError) -> None:
        """Close at once, without sending what is buffered."""
        self.reason = self.reason or reason
        for path in self._paths():
            path.abort()

    def _paths(self) -> set[Connection]:
        return {self._in, self._out, *([self._switching[1]] if self._switching else [])}

    async def switch_path(self, new: Connection) -> bool:
        """The dialler's part: continue on `new`. False, with `new` closed, if that is not possible."""
        if self._switching is not None or self._in is not self._out:
            await new.close()
            return False
        nonce = secrets.randbits(53)
        self._switching = nonce, new
        try:
            await new.send(PathSwitch(nonce))
        except ConnectionLost:
            self._switching = None
            await new.close()
            return False
        old, self._out = self._out, new
        await old.send(PathSwitch(nonce))
        return True

    async def accept_switch(self, nonce: int, new: Connection) -> None:
        """The acceptor's part, once PathSwitch was read on both paths. Raises ConnectionLost."""
        old, self._out = self._out, new
        await old.send(PathSwitch(nonce))
        self._in = new
        await old.close()

    async def _follow(self, nonce: int) -> None:
        if self._switching is None or self._switching[0] != nonce:
            raise ProtocolError("a path switch that was not started here")
        old, (_, self._in), self._switching = self._in, self._switching, None
        await old.close()
