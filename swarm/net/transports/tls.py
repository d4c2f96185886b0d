"""The direct transport: frames over TCP and TLS 1.3, one user-space copy fewer and one process fewer than the daemon.

Owns the listening sockets and the connections. Who is at the other end is proven by its certificate (`tls_identity`)
and that it is of our swarm by `hello`, both before a frame is read; parsing and back-pressure are `frame_stream`'s.
Reaches only peers whose port can be dialled; `reach` falls back to the daemon for the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Sequence
from functools import partial

from swarm.codec import DEFAULT_LIMITS, FrameLimits
from swarm.errors import AddressInUse, NetworkError, PeerUnreachable, UsageError, WrongSwarm
from swarm.messages import Ping
from swarm.net.base.frame_stream import FramedStream
from swarm.net.base.handshake import Authenticator, accept_handshake, dial_handshake
from swarm.net.base.happy_eyeballs import staggered_race
from swarm.net.base.tasks import TaskSet
from swarm.net.base.tls_addresses import TlsEndpoint, parse
from swarm.net.base.transport import Handler
from swarm.net.security.identity import Identity
from swarm.net.security.swarm_secret import public_authenticator
from swarm.net.security.tls_certificates import contexts, peer_id_of_connection
from swarm.types import PeerId

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
MAX_DIALLED = 4  # addresses of one peer, all at once
HANDSHAKE_S = 5.0
SELF_TEST_S = 5.0
FLUSH_S = 0.5  # for what is buffered when the transport closes


class TlsTransport:
    """See `transport.Transport`. Made by `await TlsTransport.start(...)`."""

    def __init__(
        self,
        identity: Identity,
        tls: tuple[ssl.SSLContext, ssl.SSLContext],
        sockets: Sequence[socket.socket],
        authenticator: Authenticator,
        limits: FrameLimits,
        max_connections: int,
    ) -> None:
        self._identity = identity
        self._server_tls, self._client_tls = tls
        self._sockets = sockets
        self._authenticator = authenticator
        self._limits = limits
        self._max_connections = max_connections
        self._handler: Handler | None = None
        self._servers: list[asyncio.Server] = []
        self._streams: set[FramedStream] = set()
        self._tasks = TaskSet("direct transport")
        self.bound = tuple(TlsEndpoint(*s.getsockname()[:2]) for s in sockets)

    @classmethod
    async def start(
        cls,
        identity: Identity,
        hosts: Sequence[str] = (),
        port: int = 0,
        *,
        authenticator: Authenticator = public_authenticator,
        limits: FrameLimits = DEFAULT_LIMITS,
        max_connections: int = MAX_CONNECTIONS,
    ) -> TlsTransport:
        """Bind `port` (0: any) of each of the IP addresses `hosts`, none to dial out only, and test that it works.

        Raises AddressInUse, UsageError, and NetworkError where this system cannot do it.
        """
        tls = contexts(identity)
        sockets: list[socket.socket] = []
        try:
            for host in dict.fromkeys(hosts):
                sockets.append(_bind(host, port))
            self = cls(identity, tls, sockets, authenticator, limits, max_connections)
            await self._test()
        except BaseException:
            for opened in sockets:
                opened.close()
            raise
        return self

    @property
    def peer(self) -> PeerId:
        return self._identity.peer

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(endpoint.address(self.peer) for endpoint in self.bound)

    async def dial(self, peer: PeerId, addresses: Sequence[str] = ()) -> FramedStream:
        """Try the direct ones of `addresses` all at once; the first that is `peer` wins. Raises PeerUnreachable."""
        if self._tasks.closed:
            raise PeerUnreachable("this transport is closed")
        if len(self._streams) >= self._max_connections:
            raise PeerUnreachable(f"{len(self._streams)} connections are open already, which is the limit")
        endpoints = list(dict.fromkeys(e for a in addresses if (e := parse(a, peer)) is not None))[:MAX_DIALLED]
        if not endpoints:
            raise PeerUnreachable(f"{peer} has no direct address")
        ways = [partial(self._attempt, peer, endpoint) for endpoint in endpoints]
        stream = await staggered_race(ways, 0.0, FramedStream.abort)
        self._adopt(stream)
        return stream

    def owns(self, stream: FramedStream) -> bool:
        """Whether a live connection is one of these."""
        return stream in self._streams

    async def serve(self, handler: Handler) -> None:
        self._handler = handler
        loop = asyncio.get_running_loop()
        while len(self._servers) < len(self._sockets):
            server = await loop.create_server(
                lambda: FramedStream(self._limits, preamble=True, on_made=self._made),
                sock=self._sockets[len(self._servers)],
                ssl=self._server_tls,
                ssl_handshake_timeout=HANDSHAKE_S,
            )
            self._servers.append(server)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for bound in self._sockets:
            bound.close()
        try:
            await self._tasks.close()
            await self._flush()
        finally:
            for stream in list(self._streams):
                stream.abort()

    async def _flush(self) -> None:
        streams = list(self._streams)
        for stream in streams:
            await stream.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                for stream in streams:
                    await stream.closed()

    # Dialling.

    async def _attempt(self, peer: PeerId, endpoint: TlsEndpoint) -> FramedStream:
        """Raises PeerUnreachable."""
        loop = asyncio.get_running_loop()
        try:
            _, stream = await loop.create_connection(
                lambda: FramedStream(self._limits, preamble=True),
                endpoint.host,
                endpoint.port,
                ssl=self._client_tls,
                server_hostname="",  # peers have no names
                ssl_handshake_timeout=HANDSHAKE_S,
            )
        except (OSError, asyncio.IncompleteReadError) as error:
            raise PeerUnreachable(f"cannot reach {peer} at {endpoint.host} port {endpoint.port}: {error}") from None
        try:
            _tune(stream)
            await self._introduce(stream, peer)
        except WrongSwarm:
            stream.abort()
            raise
        except NetworkError as error:
            stream.abort()
            raise PeerUnreachable(f"cannot reach {peer} at {endpoint.host} port {endpoint.port}: {error}") from None
        except BaseException:
            stream.abort()
            raise
        return stream

    async def _introduce(self, stream: FramedStream, peer: PeerId) -> None:
        """Raises NetworkError unless `peer` is at the other end and lets us in."""
        stream.peer = peer_id_of_connection(stream.transport_info("ssl_object"))
        if stream.peer != peer:
            raise PeerUnreachable(f"{stream.peer} answered instead")
        await dial_handshake(stream, self.peer, self._authenticator)

    # Accepting.

    def _made(self, stream: FramedStream) -> None:
        """TLS is up. Nothing that the other side sends is looked at unless it has proven who it is."""
        try:
            stream.peer = peer_id_of_connection(stream.transport_info("ssl_object"))
        except NetworkError as error:
            logger.info("refused a connection: %s", error)
            stream.abort()
            return
        if len(self._streams) >= self._max_connections or self._tasks.closed:
            stream.abort()
            return
        _tune(stream)
        self._adopt(stream)
        self._tasks.start(self._accept(stream), "accepted connection")

    async def _accept(self, stream: FramedStream) -> None:
        try:
            await accept_handshake(stream, self.peer, self._authenticator)
        except NetworkError as error:
            logger.info("refused a connection: %s", error)
            stream.abort()
            return
        assert self._handler is not None  # connections are accepted only after `serve`
        try:
            await self._handler(stream)
        finally:
            await stream.close()

    def _adopt(self, stream: FramedStream) -> None:
        self._streams.add(stream)
        stream.on_gone(self._streams.discard)

    # Self-test.

    async def _test(self) -> None:
        """Shake hands with ourselves and pass a frame, which shows at once what this system's ssl or loop cannot do."""
        near, far = socket.socketpair()
        loop = asyncio.get_running_loop()
        streams = [FramedStream(self._limits, preamble=True) for _ in range(2)]
        server, client = streams
        try:
            async with asyncio.timeout(SELF_TEST_S), asyncio.TaskGroup() as group:
                group.create_task(loop.connect_accepted_socket(lambda: server, far, ssl=self._server_tls))
                group.create_task(
                    loop.create_unix_connection(lambda: client, sock=near, ssl=self._client_tls, server_hostname="")
                )
            server.peer = peer_id_of_connection(server.transport_info("ssl_object"))
            async with asyncio.timeout(SELF_TEST_S), asyncio.TaskGroup() as group:
                group.create_task(accept_handshake(server, self.peer, self._authenticator))
                group.create_task(self._introduce(client, self.peer))
            async with asyncio.timeout(SELF_TEST_S):
                await client.send(Ping(1))
                await server.receive()
        except (TimeoutError, OSError, NetworkError) as error:
            raise NetworkError(f"direct connections do not work on this system: {error}") from None
        except ExceptionGroup as errors:
            raise NetworkError(f"direct connections do not work on this system: {errors.exceptions[0]}") from None
        finally:
            for stream in streams:
                stream.abort()
            near.close()
            far.close()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setblocking(False)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        if port:
            raise AddressInUse(f"cannot listen on {host} port {port}: {error.strerror}; choose another port") from None
        raise UsageError(f"cannot listen on {host}: {error.strerror}") from None
    return bound


# Connections that stay open for hours, carry small frames that must not wait, and notice a peer that vanished.
_OPTIONS = (
    ("SO_KEEPALIVE", socket.SOL_SOCKET, 1),
    ("TCP_NODELAY", socket.IPPROTO_TCP, 1),
    ("TCP_KEEPIDLE", socket.IPPROTO_TCP, 10),
    ("TCP_KEEPINTVL", socket.IPPROTO_TCP, 5),
    ("TCP_KEEPCNT", socket.IPPROTO_TCP, 3),
    ("TCP_USER_TIMEOUT", socket.IPPROTO_TCP, 20_000),  # ms that sent bytes may stay unacknowledged
    (
        "TCP_CONGESTION",
        socket.IPPROTO_TCP,
        b"bbr",
    ),  # keeps a long, lossy line full
)


def _tune(stream: FramedStream) -> None:
    raw = stream.transport_info("socket")
    for name, level, value in _OPTIONS:
        option = getattr(socket, name, None)
        if raw is None or option is None:
            continue
        try:
            raw.setsockopt(level, option, value)
        except OSError as error:
            logger.debug("this system does not let us set %s: %s", name, error)
