"""Accepts TLS connections: refuses before TLS begins, bounds what is unfinished, authenticates, then hands over.

Owns the listening sockets' accept loops and the unfinished handshakes. A connection that is refused costs an `accept`
and a `close`; one that is admitted has one deadline for TLS and preamble together. Does not read frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Sequence

from swarm.address_blocks import block_of_ip
from swarm.codec import FrameLimits
from swarm.errors import NetworkError, PeerUnreachable
from swarm.net.base.frame_stream import FramedStream
from swarm.net.base.half_open import HalfOpen, HandshakePolicy
from swarm.net.base.handshake import Authenticator, accept_handshake
from swarm.net.base.tasks import TaskSet
from swarm.net.base.transport import Handler
from swarm.net.security.tls_certificates import peer_id_of_connection
from swarm.token_bucket import TokenBucket
from swarm.types import PeerId

logger = logging.getLogger(__name__)

RETRY_S = 0.2  # after the system refused us a descriptor


class _Handshake:
    """A connection that has not been authenticated yet."""

    def __init__(self, raw: socket.socket, host: str) -> None:
        self.raw = raw
        self.host = host

    def drop(self) -> None:
        """The loop sees the end of the stream and closes the descriptor."""
        with contextlib.suppress(OSError):
            self.raw.shutdown(socket.SHUT_RDWR)


class TlsAcceptor:
    """`serve(sockets, handler)` until `close`. `admit(stream)`: whether there is room for an authenticated peer."""

    def __init__(
        self,
        own: PeerId,
        tls: ssl.SSLContext,
        authenticator: Authenticator,
        limits: FrameLimits,
        policy: HandshakePolicy,
        admit: Callable[[FramedStream], bool],
    ) -> None:
        self._own = own
        self._tls = tls
        self._authenticator = authenticator
        self._limits = limits
        self._policy = policy
        self._admit = admit
        self._handler: Handler | None = None
        self._tasks = TaskSet("TLS acceptor")
        self.half_open: HalfOpen[_Handshake] = HalfOpen(policy)

    def serve(self, sockets: Sequence[socket.socket], handler: Handler) -> None:
        first, self._handler = self._handler is None, handler
        for listening in sockets if first else ():
            listening.listen(self._policy.backlog)
            self._tasks.start(self._accept_all(listening), "accept")

    async def close(self) -> None:
        """Ends every handler too. The caller closes the sockets. Idempotent."""
        await self._tasks.close()

    async def _accept_all(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        looked_at = TokenBucket(self._policy.refusals_per_s, 1.0)
        while True:
            try:
                raw, address = await loop.sock_accept(listening)
            except OSError as error:  # no descriptor is free, or the caller has gone again
                logger.debug("cannot accept a connection: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            self._start(_Handshake(raw, address[0]), loop.time())
            await asyncio.sleep(looked_at.spend(1.0, loop.time()))

    def _start(self, handshake: _Handshake, now: float) -> None:
        older = self.half_open.admit(handshake, block_of_ip(handshake.host), now)
        if older is None:
            handshake.raw.close()
            return
        for other in older:
            other.drop()
        self._tasks.start(self._run(handshake), "accepted connection")

    async def _run(self, handshake: _Handshake) -> None:
        """One connection, from its first byte to its end."""
        try:
            stream = await self._establish(handshake)
        except (OSError, EOFError, NetworkError) as error:  # TimeoutError is an OSError
            logger.info("refused a connection from %s: %s", handshake.host, error)
            handshake.drop()
            return
        finally:
            self.half_open.done(handshake)
        assert self._handler is not None  # connections are accepted only after `serve`
        try:
            await self._handler(stream)
        finally:
            await stream.close()

    async def _establish(self, handshake: _Handshake) -> FramedStream:
        """Raises OSError, EOFError, NetworkError. Nothing that a peer without a valid certificate sends is parsed."""
        streams: list[FramedStream] = []

        def make() -> FramedStream:
            streams.append(FramedStream(self._limits, preamble=True))
            return streams[0]

        loop, timeout_s = asyncio.get_running_loop(), self._policy.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await loop.connect_accepted_socket(
                    make, handshake.raw, ssl=self._tls, ssl_handshake_timeout=2.0 * timeout_s
                )
                stream = streams[0]
                stream.remote = handshake.host
                stream.peer = peer_id_of_connection(stream.transport_info("ssl_object"))
                if not self._admit(stream):
                    raise PeerUnreachable("there is no room for another connection")
                tune(stream)
                await accept_handshake(stream, self._own, self._authenticator, timeout_s)
        except BaseException:
            for unfinished in streams:
                unfinished.abort()
            raise
        return stream


# Connections that stay open for hours, send small frames without delay, and detect a peer that vanished.
_SOCKET_OPTIONS = (
    ("SO_KEEPALIVE", socket.SOL_SOCKET, 1),
    ("TCP_NODELAY", socket.IPPROTO_TCP, 1),
    ("TCP_KEEPIDLE", socket.IPPROTO_TCP, 10),
    ("TCP_KEEPINTVL", socket.IPPROTO_TCP, 5),
    ("TCP_KEEPCNT", socket.IPPROTO_TCP, 3),
    ("TCP_USER_TIMEOUT", socket.IPPROTO_TCP, 20_000),  # ms that sent bytes may stay unacknowledged
    ("TCP_CONGESTION", socket.IPPROTO_TCP, b"bbr"),  # keeps a long, lossy link full
)


def tune(stream: FramedStream) -> None:
    """Set what this system lets us set of a connection's socket."""
    raw = stream.transport_info("socket")
    for name, level, value in _SOCKET_OPTIONS:
        option = getattr(socket, name, None)
        if raw is None or option is None:
            continue
        try:
            raw.setsockopt(level, option, value)
        except OSError as error:
            logger.debug("this system does not let us set %s: %s", name, error)
