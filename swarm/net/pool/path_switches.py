"""The acceptor's side of path switches: its two halves, which come on two connections in either order, are joined.

Owns the halves that wait for each other. What a switch does is in `migratable_link`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from swarm.errors import ProtocolError
from swarm.net.base.transport import Connection
from swarm.net.pool.pooled_link import PooledLink
from swarm.types import PeerId


class _PendingSwitch:
    """A peer's path switch of which one half has been received: it completes with the new path and the link."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.new_path: asyncio.Future[Connection] = loop.create_future()
        self.link: asyncio.Future[PooledLink] = loop.create_future()


class PathSwitches:
    """`timeout_s`: between the two halves."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pending: dict[tuple[PeerId, int], _PendingSwitch] = {}

    async def join(self, link: PooledLink, nonce: int) -> None:
        """An accepted connection is the new path of another link of its peer's. Raises ProtocolError."""
        async with self._switch(link.peer, nonce) as switch:
            if switch.new_path.done():
                raise ProtocolError("a second path for one path switch")
            switch.new_path.set_result(link.path)
            link.migrated_to = await switch.link

    async def follow(self, link: PooledLink, nonce: int) -> None:
        """The old path has ended; continue on the new one. Raises ProtocolError, ConnectionLost."""
        async with self._switch(link.peer, nonce) as switch:
            if switch.link.done():
                raise ProtocolError("a second link for one path switch")
            new = await switch.new_path
            switch.link.set_result(link)
            await link.accept_switch(nonce, new)

    @contextlib.asynccontextmanager
    async def _switch(self, peer: PeerId, nonce: int) -> AsyncIterator[_PendingSwitch]:
        switch = self._pending.setdefault((peer, nonce), _PendingSwitch())
        try:
            async with asyncio.timeout(self._timeout_s):
                yield switch
        except TimeoutError:
            raise ProtocolError("half a path switch") from None
        finally:
            self._pending.pop((peer, nonce), None)
