"""The TLS transport: frames over TCP and TLS 1.3, one user-space copy fewer and one process fewer than libp2p streams.

Owns the bound sockets and the connections; `tls_acceptor` accepts. The peer is authenticated by its certificate
(`security.tls_certificates`) and its membership of the swarm by the handshake (`base.handshake`), both before a frame
is read; parsing and back-pressure belong to `base.frame_stream`. Reaches only peers whose port can be dialled; `multi`
falls back to libp2p streams for the others.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from swarm.net.base.tls_addresses import TlsEndpoint, parse
from swarm.net.base.transport import Handler, TransportPolicy
from swarm.net.security.identity import Identity
from swarm.net.security.swarm_secret import public_authenticator
from swarm.net.security.tls_certificates import contexts, peer_id_of_connection
from swarm.net.transports.tls_acceptor import TlsAcceptor, tune
from swarm.types import PeerId


class TlsTransport:
    """See `transport.Transport`. Made by `await TlsTransport.start(...)`."""

    def __init__(
        self,
        identity: Identity,
        tls: tuple[ssl.SSLContext, ssl.SSLContext],
        sockets: Sequence[socket.socket],
        authenticator: Authenticator,
        limits: FrameLimits,
        policy: TransportPolicy,
    ) -> None:
        self._identity = identity
        self._server_tls, self._client_tls = tls
        self._sockets = sockets
        self._authenticator = authenticator
        self._limits = limits
        self._policy = policy
        self._streams: set[FramedStream] = set()
        self._closed = False
        self._acceptor = TlsAcceptor(
            identity.peer, self._server_tls, authenticator, limits, policy.handshakes, self._admit
        )
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
        policy: TransportPolicy = TransportPolicy(),
    ) -> TlsTransport:
        """Bind `port` (0: any) of each of the IP addresses `hosts`, none to dial out only, and run a self-test.

        Raises AddressInUse, UsageError, and NetworkError where this system cannot do it.
        """
        tls = contexts(identity)
        sockets: list[socket.socket] = []
        try:
            for host in dict.fromkeys(hosts):
                sockets.append(_bind(host, port))
            self = cls(identity, tls, sockets, authenticator, limits, policy)
            await self._self_test()
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
        """Dial the TLS ones of `addresses` in parallel; the first that is `peer` wins. Raises PeerUnreachable."""
        if self._closed:
            raise PeerUnreachable("this transport is closed")
        if len(self._streams) >= self._policy.max_connections:
            raise PeerUnreachable(f"{len(self._streams)} connections are open already, which is the limit")
        endpoints = list(dict.fromkeys(e for a in addresses if (e := parse(a, peer)) is not None))
        if not endpoints:
            raise PeerUnreachable(f"{peer} has no direct address")
        attempts = [partial(self._dial_endpoint, peer, e) for e in endpoints[: self._policy.max_parallel_dials]]
        stream = await staggered_race(attempts, 0.0, FramedStream.abort)
        self._track(stream)
        return stream

    def owns(self, stream: FramedStream) -> bool:
        """Whether a live connection is one of these."""
        return stream in self._streams

    async def serve(self, handler: Handler) -> None:
        self._acceptor.serve(self._sockets, handler)

    async def close(self) -> None:
        self._closed = True
        try:
            await self._acceptor.close()
            for bound in self._sockets:
                bound.close()
            await self._flush()
        finally:
            for stream in list(self._streams):
                stream.abort()

    async def _flush(self) -> None:
        streams = list(self._streams)
        for stream in streams:
            await stream.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._policy.flush_timeout_s):
                for stream in streams:
                    await stream.closed()

    # Dialling.

    async def _dial_endpoint(self, peer: PeerId, endpoint: TlsEndpoint) -> FramedStream:
        """Raises PeerUnreachable."""
        loop = asyncio.get_running_loop()
        try:
            _, stream = await loop.create_connection(
                lambda: FramedStream(self._limits, preamble=True),
                endpoint.host,
                endpoint.port,
                ssl=self._client_tls,
                server_hostname="",  # peers have no names
                ssl_handshake_timeout=self._policy.handshake_timeout_s,
            )
        except (OSError, asyncio.IncompleteReadError) as error:
            raise PeerUnreachable(f"cannot reach {peer} at {endpoint.host} port {endpoint.port}: {error}") from None
        try:
            tune(stream)
            stream.remote = endpoint.host
            await self._authenticate(stream, peer)
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

    async def _authenticate(self, stream: FramedStream, peer: PeerId) -> None:
        """Raises NetworkError unless the other end is `peer` and accepts us."""
        stream.peer = peer_id_of_connection(stream.transport_info("ssl_object"))
        if stream.peer != peer:
            raise PeerUnreachable(f"{stream.peer} answered instead")
        await dial_handshake(stream, self.peer, self._authenticator, self._policy.handshake_timeout_s)

    # Accepting.

    def _admit(self, stream: FramedStream) -> bool:
        """Whether there is room for one more, which is authenticated."""
        if len(self._streams) >= self._policy.max_connections or self._closed:
            return False
        self._track(stream)
        return True

    def _track(self, stream: FramedStream) -> None:
        self._streams.add(stream)
        stream.on_closed(self._streams.discard)

    # Self-test.

    async def _self_test(self) -> None:
        """Connect to ourselves and pass a frame, which shows at once what this system's ssl or loop cannot do."""
        near, far = socket.socketpair()
        loop, timeout_s = asyncio.get_running_loop(), self._policy.handshake_timeout_s
        streams = [FramedStream(self._limits, preamble=True) for _ in range(2)]
        server, client = streams
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                group.create_task(loop.connect_accepted_socket(lambda: server, far, ssl=self._server_tls))
                group.create_task(
                    loop.create_unix_connection(lambda: client, sock=near, ssl=self._client_tls, server_hostname="")
                )
            server.peer = peer_id_of_connection(server.transport_info("ssl_object"))
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                group.create_task(accept_handshake(server, self.peer, self._authenticator, timeout_s))
                group.create_task(self._authenticate(client, self.peer))
            async with asyncio.timeout(timeout_s):
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
