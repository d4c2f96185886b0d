"""A connection to a peer as its sessions see it, while what carries the frames may change underneath.

Owns the two paths of a move and which frames go on which. Moving loses no frame and keeps their order, without a pause:

    dialler   says Move on the new path, then Move on the old one; all it sends later goes on the new path
    acceptor  having read Move on both, says Move on the old path; all it sends later goes on the new path
    both      read the old path up to its Move, then the new one

Knows neither why a link moves nor who reads it (`pool`).
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
    """Made by the pool for each connection, dialled (`outgoing`) or accepted. What sessions send on."""

    def __init__(self, connection: Connection, outgoing: bool) -> None:
        self.peer: PeerId = connection.peer
        self.outgoing = outgoing
        self.reason: NetworkError | None = None  # why it was closed, if it was from here
        self.ended = asyncio.Event()  # set by the pool when nobody reads it any more
        self._in = self._out = connection
        self._switching: tuple[int, Connection] | None = None  # of a dialler that waits for the acceptor's Move

    @property
    def path(self) -> Connection:
        """What carries the frames that are sent now."""
        return self._out

    async def send(self, message: AnyMessage, body: Buffer = b"") -> None:
        """See `transport.Connection.send`."""
        await self._out.send(message, body)

    async def receive(self) -> tuple[AnyMessage, memoryview]:
        """See `transport.Connection.receive`. A `Move` of the acceptor's is followed here; a dialler's is handed on."""
        while True:
            message, body = await self._in.receive()
            if not (self.outgoing and isinstance(message, PathSwitch)):
                return message, body
            await self._follow(message.nonce)

    async def close(self, reason: NetworkError | None = None) -> None:
        """Idempotent; the first `reason` stands."""
        self.reason = self.reason or reason
        paths = {self._in, self._out, *([self._switching[1]] if self._switching else [])}
        for path in paths:
            await path.close()

    async def switch_path(self, new: Connection) -> bool:
        """A dialler's part: go on over `new`. False, with `new` closed, if that is not to be had."""
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
        """An acceptor's part, once both paths have said Move. Raises ConnectionLost."""
        old, self._out = self._out, new
        await old.send(PathSwitch(nonce))
        self._in = new
        await old.close()

    async def _follow(self, nonce: int) -> None:
        if self._switching is None or self._switching[0] != nonce:
            raise ProtocolError("a move that nobody began")
        old, (_, self._in), self._switching = self._in, self._switching, None
        await old.close()
