"""The universal transport: frames in libp2p streams, encrypted and authenticated by peer id.

Owns the streams of one peer, those it opened and those it accepted. What opens them is a `host`, mostly hivemind's p2p
daemon, without the Go program py-libp2p; parsing and back-pressure are `frame_stream`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from swarm.codec import DEFAULT_LIMITS, FrameLimits
from swarm.config import Libp2pImpl
from swarm.errors import NetworkError, PeerUnreachable, WrongSwarm
from swarm.net.base.frame_stream import FramedStream
from swarm.net.base.handshake import Authenticator, accept_handshake, dial_handshake
from swarm.net.base.tasks import TaskSet
from swarm.net.base.transport import Handler
from swarm.net.libp2p import host
from swarm.net.libp2p.go_daemon_control import accepted_peer
from swarm.net.libp2p.host import HostControl, Libp2pHost, ProtocolNotSupported
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.identity import Identity
from swarm.types import PeerId

logger = logging.getLogger(__name__)

PROTOCOL = "/swarm/rpc/2"
PRIVATE_PROTOCOL = "/swarm/private/2"  # frames come after a `hello`
MAX_CONNECTIONS = 256
PREAMBLE_TIMEOUT_S = 5.0
FLUSH_S = 0.5  # for what is buffered when the transport closes


class Libp2pTransport:
    """See `transport.Transport`. Made by `await Libp2pTransport.start(...)`."""

    def __init__(
        self,
        identity: Identity,
        daemon: Libp2pHost,
        limits: FrameLimits,
        max_connections: int,
        dial_timeout_s: float,
        authenticator: Authenticator | None = None,
    ) -> None:
        self._identity = identity
        self._daemon = daemon
        self._limits = limits
        self._max_connections = max_connections
        self._dial_timeout_s = dial_timeout_s
        self._authenticator = authenticator
        self._protocol = PROTOCOL if authenticator is None else PRIVATE_PROTOCOL
        self._handler: Handler | None = None
        self._server: asyncio.Server | None = None
        self._streams: set[FramedStream] = set()
        self._tasks = TaskSet("daemon transport")

    @classmethod
    async def start(
        cls,
        identity: Identity,
        options: HostOptions | None = None,
        *,
        limits: FrameLimits = DEFAULT_LIMITS,
        max_connections: int = MAX_CONNECTIONS,
        dial_timeout_s: float = 10.0,
        authenticator: Authenticator | None = None,
        libp2p_impl: Libp2pImpl = "go",
    ) -> Libp2pTransport:
        """Start a host and join `options.peers`. With `authenticator`, members of a private swarm only are connected.

        Raises what `Libp2pHost.start` does.
        """
        daemon = await host.start(identity, options, libp2p_impl)
        return cls(identity, daemon, limits, max_connections, dial_timeout_s, authenticator)

    @property
    def peer(self) -> PeerId:
        return self._identity.peer

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._daemon.addresses

    @property
    def control(self) -> HostControl:
        """For others that share the daemon, such as the directory."""
        return self._daemon.control

    @property
    def daemon(self) -> Libp2pHost:
        """For others that share it. If it dies, every connection is lost; it is started again."""
        return self._daemon

    @property
    def failed(self) -> asyncio.Event:
        """Set when the daemon has died and cannot be brought back: no connection can be made any more."""
        return self._daemon.failed

    @property
    def daemon_pid(self) -> int:
        return self._daemon.pid

    async def dial(self, peer: PeerId, addresses: Sequence[str] = ()) -> FramedStream:
        if self._tasks.closed or self.failed.is_set():
            raise PeerUnreachable("this transport is closed")
        if len(self._streams) >= self._max_connections:
            raise PeerUnreachable(f"{len(self._streams)} connections are open already, which is the limit")
        try:
            async with asyncio.timeout(self._dial_timeout_s):
                if addresses:
                    await self.control.connect(peer, addresses)
                stream = await self._open(peer)
                await self._introduce(stream)
        except TimeoutError:
            raise PeerUnreachable(f"{peer} did not answer within {self._dial_timeout_s:g} s") from None
        except PeerUnreachable:
            raise
        except NetworkError as error:
            raise PeerUnreachable(f"cannot reach {peer}: {error}") from None
        self._adopt(stream)
        return stream

    async def _open(self, peer: PeerId) -> FramedStream:
        try:
            return await self.control.open_stream(peer, self._protocol, self._limits)
        except ProtocolNotSupported as error:
            none = error
        try:
            other = await self.control.open_stream(
                peer, PROTOCOL if self._authenticator else PRIVATE_PROTOCOL, self._limits
            )
        except PeerUnreachable:
            raise none from None
        other.abort()
        if self._authenticator:
            raise WrongSwarm(f"{peer} is of an open swarm, which has no secret: join it without one")
        raise WrongSwarm(f"{peer} is of a private swarm: ask its members for an invitation")

    async def _introduce(self, stream: FramedStream) -> None:
        if self._authenticator is None:
            stream.begin()
            return
        try:
            await dial_handshake(stream, self.peer, self._authenticator)
        except BaseException:
            stream.abort()
            raise

    async def serve(self, handler: Handler) -> None:
        self._handler = handler
        if self._server is None:
            loop = asyncio.get_running_loop()
            inbound = self._daemon.inbound
            self._server = await loop.create_unix_server(
                lambda: FramedStream(self._limits, preamble=True, on_made=self._made), str(inbound)
            )
            await self._accept_streams()
            self._daemon.on_up(self._accept_streams)

    async def _accept_streams(self) -> None:
        await self.control.accept_streams(self._protocol, self._daemon.inbound)

    async def close(self) -> None:
        try:
            if self._server is not None:
                self._server.close()
            await self._tasks.close()
            await self._flush()
        finally:
            for stream in list(self._streams):
                stream.abort()
            await self._daemon.stop()

    async def _flush(self) -> None:
        streams = list(self._streams)
        if not streams:
            return
        for stream in streams:
            await stream.close()
        try:
            async with asyncio.timeout(FLUSH_S):
                for stream in streams:
                    await stream.closed()
        except TimeoutError:
            logger.debug("some peers did not take their last frames")

    def _made(self, stream: FramedStream) -> None:
        if len(self._streams) >= self._max_connections:
            stream.abort()
            return
        self._adopt(stream)
        self._tasks.start(self._accept(stream), "accepted stream")

    def _adopt(self, stream: FramedStream) -> None:
        self._streams.add(stream)
        stream.on_gone(self._streams.discard)

    async def _accept(self, stream: FramedStream) -> None:
        """Run one accepted stream to its end."""
        try:
            async with asyncio.timeout(PREAMBLE_TIMEOUT_S):
                stream.peer = accepted_peer(await stream.preamble())
        except (TimeoutError, NetworkError) as error:
            logger.warning("a stream that the p2p daemon did not introduce: %s", error)
            stream.abort()
            return
        try:
            if self._authenticator is None:
                stream.begin()
            else:
                await accept_handshake(stream, self.peer, self._authenticator)
        except NetworkError as error:
            logger.info("refused a stream: %s", error)
            stream.abort()
            return
        assert self._handler is not None  # streams are accepted only after `serve`
        try:
            await self._handler(stream)
        finally:
            await stream.close()
