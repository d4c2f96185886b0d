"""The libp2p transport, which reaches every peer: frames in libp2p streams, encrypted and authenticated by peer id.

Owns the streams of one peer, those it opened and those it accepted. They are opened by a libp2p host (`libp2p.host`:
hivemind's Go daemon or py-libp2p); parsing and back-pressure belong to `base.frame_stream`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from swarm.address_blocks import block_of_ip
from swarm.codec import DEFAULT_LIMITS, FrameLimits
from swarm.config import Libp2pImpl
from swarm.errors import NetworkError, PeerUnreachable, WrongSwarm
from swarm.net.base.frame_stream import FramedStream
from swarm.net.base.half_open import HalfOpen
from swarm.net.base.handshake import Authenticator, accept_handshake, dial_handshake
from swarm.net.base.tasks import TaskSet
from swarm.net.base.transport import Handler, TransportPolicy
from swarm.net.libp2p import host
from swarm.net.libp2p.go_daemon_control import accepted_from
from swarm.net.libp2p.host import HostControl, Libp2pHost, ProtocolNotSupported
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.identity import Identity
from swarm.types import PeerId

logger = logging.getLogger(__name__)

PROTOCOL = "/swarm/rpc/2"
PRIVATE_PROTOCOL = "/swarm/private/2"  # frames come after the handshake


class Libp2pTransport:
    """See `transport.Transport`. Made by `await Libp2pTransport.start(...)`."""

    def __init__(
        self,
        identity: Identity,
        daemon: Libp2pHost,
        limits: FrameLimits,
        dial_timeout_s: float,
        authenticator: Authenticator | None,
        policy: TransportPolicy,
    ) -> None:
        self._identity = identity
        self._daemon = daemon
        self._limits = limits
        self._policy = policy
        self._dial_timeout_s = dial_timeout_s
        self._authenticator = authenticator
        self._protocol = PROTOCOL if authenticator is None else PRIVATE_PROTOCOL
        self._handler: Handler | None = None
        self._server: asyncio.Server | None = None
        self._streams: set[FramedStream] = set()
        self._tasks = TaskSet("libp2p transport")
        self._half_open: HalfOpen[FramedStream] = HalfOpen(policy.handshakes)

    @classmethod
    async def start(
        cls,
        identity: Identity,
        options: HostOptions | None = None,
        *,
        limits: FrameLimits = DEFAULT_LIMITS,
        dial_timeout_s: float = 10.0,
        authenticator: Authenticator | None = None,
        libp2p_impl: Libp2pImpl = "go",
        policy: TransportPolicy = TransportPolicy(),
    ) -> Libp2pTransport:
        """Start a host and join `options.peers`. With an `authenticator`, connect only members of its private swarm.

        Raises what `Libp2pHost.start` does.
        """
        daemon = await host.start(identity, options, libp2p_impl)
        return cls(identity, daemon, limits, dial_timeout_s, authenticator, policy)

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
        """For others that share the host, such as the directory."""
        return self._daemon.control

    @property
    def daemon(self) -> Libp2pHost:
        """The libp2p host, for others that share it. If it dies, every connection is lost; it is restarted."""
        return self._daemon

    @property
    def failed(self) -> asyncio.Event:
        """Set when the host has died and cannot be restarted: no connection can be made any more."""
        return self._daemon.failed

    @property
    def daemon_pid(self) -> int:
        return self._daemon.pid

    async def dial(self, peer: PeerId, addresses: Sequence[str] = ()) -> FramedStream:
        if self._tasks.closed or self.failed.is_set():
            raise PeerUnreachable("this transport is closed")
        if len(self._streams) >= self._policy.max_connections:
            raise PeerUnreachable(f"{len(self._streams)} connections are open already, which is the limit")
        try:
            async with asyncio.timeout(self._dial_timeout_s):
                if addresses:
                    await self.control.connect(peer, addresses)
                stream = await self._open(peer)
                await self._authenticate(stream)
        except TimeoutError:
            raise PeerUnreachable(f"{peer} did not answer within {self._dial_timeout_s:g} s") from None
        except PeerUnreachable:
            raise
        except NetworkError as error:
            raise PeerUnreachable(f"cannot reach {peer}: {error}") from None
        self._track(stream)
        return stream

    async def _open(self, peer: PeerId) -> FramedStream:
        try:
            return await self.control.open_stream(peer, self._protocol, self._limits)
        except ProtocolNotSupported as error:
            unsupported = error
        try:
            other = await self.control.open_stream(
                peer, PROTOCOL if self._authenticator else PRIVATE_PROTOCOL, self._limits
            )
        except PeerUnreachable:
            raise unsupported from None
        other.abort()
        if self._authenticator:
            raise WrongSwarm(f"{peer} is of an open swarm, which has no secret: join it without one")
        raise WrongSwarm(f"{peer} is of a private swarm: ask its members for an invitation")

    async def _authenticate(self, stream: FramedStream) -> None:
        if self._authenticator is None:
            stream.begin()
            return
        try:
            await dial_handshake(stream, self.peer, self._authenticator, self._policy.handshake_timeout_s)
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
            async with asyncio.timeout(self._policy.flush_timeout_s):
                for stream in streams:
                    await stream.closed()
        except TimeoutError:
            logger.debug("some peers did not read their last frames")

    def _made(self, stream: FramedStream) -> None:
        if len(self._streams) >= self._policy.max_connections:
            stream.abort()
            return
        self._track(stream)
        self._tasks.start(self._accept(stream), "accepted stream")

    def _track(self, stream: FramedStream) -> None:
        self._streams.add(stream)
        stream.on_closed(self._streams.discard)

    async def _accept(self, stream: FramedStream) -> None:
        """Run one accepted stream to its end."""
        try:
            async with asyncio.timeout(self._policy.handshakes.timeout_s):
                stream.peer, stream.remote = accepted_from(await stream.preamble())
        except (TimeoutError, NetworkError) as error:
            logger.warning("a stream came without the p2p daemon's preamble: %s", error)
            stream.abort()
            return
        older = self._half_open.admit(stream, block_of_ip(stream.remote), asyncio.get_running_loop().time())
        if older is None:
            stream.abort()
            return
        for other in older:
            other.abort()
        try:
            if self._authenticator is None:
                stream.begin()
            else:
                await accept_handshake(stream, self.peer, self._authenticator, self._policy.handshakes.timeout_s)
        except NetworkError as error:
            logger.info("refused a stream: %s", error)
            stream.abort()
            return
        finally:
            self._half_open.done(stream)
        assert self._handler is not None  # streams are accepted only after `serve`
        try:
            await self._handler(stream)
        finally:
            await stream.close()
