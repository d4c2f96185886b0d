"""Both transports as one: direct TLS connections to peers that can be dialled, libp2p streams to the others.

Owns the choice. A peer's direct addresses get a head start over a libp2p stream, and the first connection wins. A peer
that is connected by libp2p is dialled directly again in the background, with backoff; a direct connection is handed to
the pool, which migrates the link to it. Knows the details of neither TLS nor libp2p.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from swarm.codec import DEFAULT_LIMITS, FrameLimits
from swarm.config import Libp2pImpl
from swarm.errors import NetworkError, PeerUnreachable
from swarm.net.base.frame_stream import FramedStream
from swarm.net.base.half_open import HandshakePolicy
from swarm.net.base.happy_eyeballs import staggered_race
from swarm.net.base.tasks import TaskSet
from swarm.net.base.tls_addresses import advertised, is_direct, is_relayed, listen_ip
from swarm.net.base.transport import Handler, OnUpgrade, TransportPolicy
from swarm.net.discovery.autonat import AutoNatServer, ReachabilityReport, probe
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.identity import Identity
from swarm.net.security.swarm_secret import SwarmSecret, public_authenticator
from swarm.net.transports.libp2p_streams import Libp2pTransport
from swarm.net.transports.tls import TlsTransport
from swarm.types import PeerId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MultiTransportPolicy:
    """How the two transports compete. Times in seconds."""

    direct_head_start_s: float = 0.3  # for direct addresses: time lost where they fail against a slower connection
    direct_timeout_s: float = 5.0  # firewalls drop silently: slow links against waiting for nothing
    relay_timeout_s: float = 8.0  # for one of our relays to answer at the start
    address_refresh_interval_s: float = 5.0  # between two queries of the host's addresses: fresh records against load
    upgrade_backoff_s: tuple[float, ...] = (1.0, 5.0, 30.0, 120.0)  # between direct dials of one peer; the last repeats


class MultiTransport:
    """See `transport.Transport` and `transport.UpgradingTransport`. Made by `await MultiTransport.start(...)`.

    `direct_disabled_reason`: why there are no direct connections here; "" if there are.
    """

    def __init__(
        self,
        daemon: Libp2pTransport,
        direct: TlsTransport | None,
        direct_disabled_reason: str,
        relays: Sequence[str] = (),
        policy: MultiTransportPolicy = MultiTransportPolicy(),
    ) -> None:
        self.daemon = daemon
        # The host does not list its relayed addresses, but they follow from the relays'.
        self._relayed = tuple(f"{relay}/p2p-circuit/p2p/{daemon.peer}" for relay in relays)
        self.direct_disabled_reason = direct_disabled_reason
        self._direct = direct
        self._policy = policy
        self._on_upgrade: OnUpgrade | None = None
        self._refreshing = False
        self._autonat = AutoNatServer(daemon.daemon, self._verify_address, time.monotonic)
        self._tasks = TaskSet("multi transport")

    @classmethod
    async def start(
        cls,
        identity: Identity,
        options: HostOptions | None = None,
        *,
        direct: bool = True,
        direct_port: int = 0,
        accept: bool = True,
        secret: SwarmSecret | None = None,
        limits: FrameLimits = DEFAULT_LIMITS,
        dial_timeout_s: float = 10.0,
        libp2p_impl: Libp2pImpl = "go",
        policy: MultiTransportPolicy = MultiTransportPolicy(),
        handshakes: HandshakePolicy = HandshakePolicy(),
    ) -> MultiTransport:
        """Start a libp2p host, and direct connections beside it if `direct` and the system supports them.

        `accept`: also listen for direct connections, on `direct_port` (0: any) of the IP addresses that the host
        listens on. `handshakes`: with those who connect directly. Raises what `Libp2pTransport.start` does,
        AddressInUse also for a `direct_port` that is taken.
        """
        options = options or HostOptions()
        tls: TlsTransport | None = None
        disabled_reason = "" if direct else "they are turned off"
        if direct:
            hosts = [host for address in options.listen if (host := listen_ip(address)) is not None] if accept else []
            authenticator = secret.authenticate if secret else public_authenticator
            try:
                direct_policy = TransportPolicy(handshakes=handshakes)
                tls = await TlsTransport.start(
                    identity, hosts, direct_port, authenticator=authenticator, limits=limits, policy=direct_policy
                )
            except NetworkError as error:
                disabled_reason = str(error)
                logger.warning("no direct connections, everything goes through the p2p daemon: %s", error)
        try:
            daemon = await Libp2pTransport.start(
                identity,
                options,
                limits=limits,
                dial_timeout_s=dial_timeout_s,
                authenticator=secret.authenticate if secret else None,
                libp2p_impl=libp2p_impl,
            )
        except BaseException:
            if tls is not None:
                await tls.close()
            raise
        self = cls(daemon, tls, disabled_reason, options.relays, policy)
        try:
            await self._check_relays(options.relays)
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def peer(self) -> PeerId:
        return self.daemon.peer

    @property
    def addresses(self) -> tuple[str, ...]:
        """One of the host's comes first, for people to pass on; then the direct ones, relayed ones, the others."""
        own = [address for address in self.daemon.addresses if not is_relayed(address)]
        bound = self._direct.bound if self._direct is not None else ()
        direct = [endpoint.address(self.peer) for endpoint in advertised(bound, own)]
        return (*own[:1], *direct, *self._relayed, *own[1:])

    async def dial(self, peer: PeerId, addresses: Sequence[str] = ()) -> FramedStream:
        direct = tuple(address for address in addresses if is_direct(address)) if self._direct is not None else ()
        others = tuple(address for address in addresses if not is_direct(address))
        attempts = [partial(self._dial_directly, peer, direct)] if direct else []
        stream = await staggered_race(
            [*attempts, partial(self.daemon.dial, peer, others)], self._policy.direct_head_start_s, FramedStream.abort
        )
        if direct and self._on_upgrade is not None and not (self._direct and self._direct.owns(stream)):
            self._tasks.start(self._upgrade(stream, direct, self._on_upgrade), f"upgrade to {peer}")
        return stream

    async def _dial_directly(self, peer: PeerId, addresses: Sequence[str]) -> FramedStream:
        """Raises PeerUnreachable."""
        assert self._direct is not None  # or no address would count as direct
        try:
            async with asyncio.timeout(self._policy.direct_timeout_s):
                return await self._direct.dial(peer, addresses)
        except TimeoutError:
            raise PeerUnreachable(
                f"{peer} did not answer directly within {self._policy.direct_timeout_s:g} s"
            ) from None

    async def serve(self, handler: Handler) -> None:
        if self._direct is not None:
            await self._direct.serve(handler)
        await self.daemon.serve(handler)
        if not self._refreshing:
            self._refreshing = True
            await self._autonat.serve()
            self._tasks.start(self._refresh_addresses(), "addresses")

    def on_upgrade(self, callback: OnUpgrade) -> None:
        self._on_upgrade = callback

    async def close(self) -> None:
        await self._tasks.close()
        await self._autonat.close()
        try:
            if self._direct is not None:
                await self._direct.close()
        finally:
            await self.daemon.close()

    async def check_reachability(self, peer: PeerId) -> ReachabilityReport:
        """AutoNAT: have a peer that runs this version check whether it can dial us. Raises NetworkError."""
        return await probe(self.daemon.daemon, peer, self.addresses)

    async def _verify_address(self, peer: PeerId, address: str) -> bool:
        """Whether a direct address of `peer` leads to `peer`. Raises PeerUnreachable."""
        if self._direct is None:
            return False
        await (await self._direct.dial(peer, (address,))).close()
        return True

    async def _check_relays(self, relays: Sequence[str]) -> None:
        """Raises PeerUnreachable if there are some and none answers."""
        for relay in relays:
            try:
                async with asyncio.timeout(self._policy.relay_timeout_s):
                    await self.daemon.control.connect(relay.rpartition("/p2p/")[2], (relay,))
                return
            except (TimeoutError, NetworkError) as error:
                logger.warning("the relay %s does not answer: %s", relay, error)
        if relays:
            raise PeerUnreachable(f"none of the relays answers, choose others: {', '.join(relays)}")

    async def _refresh_addresses(self) -> None:
        while True:
            await asyncio.sleep(self._policy.address_refresh_interval_s)
            try:
                await self.daemon.daemon.refresh()
            except NetworkError as error:
                logger.debug("cannot query the p2p daemon's addresses: %s", error)

    async def _upgrade(self, stream: FramedStream, addresses: Sequence[str], callback: OnUpgrade) -> None:
        """Dial a peer that is connected by libp2p directly, until that succeeds or the stream is closed."""
        backoff = self._policy.upgrade_backoff_s
        for pause_s in itertools.chain(backoff, itertools.repeat(backoff[-1])):
            if await _closed_within(stream, pause_s):
                return
            try:
                better = await self._dial_directly(stream.peer, addresses)
            except PeerUnreachable as error:
                logger.debug("no direct connection yet: %s", error)
                continue
            await callback(stream, better)
            return


async def _closed_within(stream: FramedStream, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await stream.closed()
    except TimeoutError:
        return False
    return True
