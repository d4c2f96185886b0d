"""Both transports as one: direct connections to peers that can be dialled, the daemon's streams to the others.

Owns the choice. A peer's direct addresses have a head start, then the daemon is asked for a stream beside them, and
what leads to the peer first is taken. Whoever was reached through the daemon is tried directly again and again in the
background, and what succeeds is offered to the pool, which moves the link. Knows neither TLS nor daemons.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

from swarm.codec import DEFAULT_LIMITS, FrameLimits
from swarm.config import Libp2pImpl
from swarm.errors import NetworkError, PeerUnreachable
from swarm.net.base.frame_stream import FramedStream
from swarm.net.base.happy_eyeballs import staggered_race
from swarm.net.base.tasks import TaskSet
from swarm.net.base.tls_addresses import advertised, is_direct, is_relayed, listen_ip
from swarm.net.base.transport import Connection, Handler, OnUpgrade
from swarm.net.discovery.autonat import AutoNatServer, ReachabilityReport, probe
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.identity import Identity
from swarm.net.security.swarm_secret import SwarmSecret, public_authenticator
from swarm.net.transports.libp2p_streams import Libp2pTransport
from swarm.net.transports.tls import TlsTransport
from swarm.types import PeerId

logger = logging.getLogger(__name__)

DIRECT_FIRST_S = 0.3  # of the direct addresses, before the daemon is asked too
DIRECT_TIMEOUT_S = 5.0  # for them to lead anywhere: no answer at all is common behind firewalls
RELAY_TIMEOUT_S = 8.0
REFRESH_S = 5.0  # between two looks at the daemon's own addresses
PROBE_AFTER_S = (1.0, 5.0, 30.0, 120.0)  # between probes of one peer; the last again and again


class MultiTransport:
    """See `transport.Transport` and `transport.UpgradingTransport`. Made by `await MultiTransport.start(...)`.

    `direct_disabled_reason`: why there are no direct connections here; "" if there are.
    """

    def __init__(
        self, daemon: Libp2pTransport, direct: TlsTransport | None, without_direct: str, relays: Sequence[str] = ()
    ) -> None:
        self.daemon = daemon
        # The daemon does not tell the addresses by way of its relays, but they follow from the relays'.
        self._relayed = tuple(f"{relay}/p2p-circuit/p2p/{daemon.peer}" for relay in relays)
        self.direct_disabled_reason = without_direct
        self._direct = direct
        self._on_better: OnUpgrade | None = None
        self._refreshing = False
        self._dial_back = AutoNatServer(daemon.daemon, self._verify_address, time.monotonic)
        self._tasks = TaskSet("reach")

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
    ) -> MultiTransport:
        """Start a p2p daemon (or what stands in for it), and direct connections beside it if `direct` and this system
        can.

        `accept`: also listen for direct connections, on `direct_port` (0: any) of the IP addresses that the daemon
        listens on. Raises what `Libp2pTransport.start` does, AddressInUse also for a `direct_port` that is taken.
        """
        options = options or HostOptions()
        beside: TlsTransport | None = None
        problem = "" if direct else "they are turned off"
        if direct:
            hosts = [host for address in options.listen if (host := listen_ip(address)) is not None] if accept else []
            authenticator = secret.authenticate if secret else public_authenticator
            try:
                beside = await TlsTransport.start(
                    identity, hosts, direct_port, authenticator=authenticator, limits=limits
                )
            except NetworkError as error:
                problem = str(error)
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
            if beside is not None:
                await beside.close()
            raise
        self = cls(daemon, beside, problem, options.relays)
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
        """One of the daemon's leads, for people to pass on; then the direct ones, those through relays, the others."""
        own = [address for address in self.daemon.addresses if not is_relayed(address)]
        bound = self._direct.bound if self._direct is not None else ()
        direct = [endpoint.address(self.peer) for endpoint in advertised(bound, own)]
        return (*own[:1], *direct, *self._relayed, *own[1:])

    async def dial(self, peer: PeerId, addresses: Sequence[str] = ()) -> Connection:
        direct = tuple(address for address in addresses if is_direct(address)) if self._direct is not None else ()
        others = tuple(address for address in addresses if not is_direct(address))
        ways = [partial(self._dial_directly, peer, direct)] if direct else []
        stream = await staggered_race(
            [*ways, partial(self.daemon.dial, peer, others)], DIRECT_FIRST_S, FramedStream.abort
        )
        if direct and self._on_better is not None and not (self._direct and self._direct.owns(stream)):
            self._tasks.start(self._probe(stream, direct, self._on_better), f"probe of {peer}")
        return stream

    async def _dial_directly(self, peer: PeerId, addresses: Sequence[str]) -> FramedStream:
        """Raises PeerUnreachable."""
        assert self._direct is not None  # or no address would count as direct
        try:
            async with asyncio.timeout(DIRECT_TIMEOUT_S):
                return await self._direct.dial(peer, addresses)
        except TimeoutError:
            raise PeerUnreachable(f"{peer} did not answer directly within {DIRECT_TIMEOUT_S:g} s") from None

    async def serve(self, handler: Handler) -> None:
        if self._direct is not None:
            await self._direct.serve(handler)
        await self.daemon.serve(handler)
        if not self._refreshing:
            self._refreshing = True
            await self._dial_back.serve()
            self._tasks.start(self._refresh(), "addresses")

    def on_upgrade(self, found: OnUpgrade) -> None:
        self._on_better = found

    async def close(self) -> None:
        await self._tasks.close()
        await self._dial_back.close()
        try:
            if self._direct is not None:
                await self._direct.close()
        finally:
            await self.daemon.close()

    async def check_reachability(self, peer: PeerId) -> ReachabilityReport:
        """Have a peer that runs this version find out whether it can dial us. Raises NetworkError."""
        return await probe(self.daemon.daemon, peer, self.addresses)

    async def _verify_address(self, peer: PeerId, address: str) -> bool:
        if self._direct is None:
            return False
        await (await self._direct.dial(peer, (address,))).close()
        return True

    async def _check_relays(self, relays: Sequence[str]) -> None:
        """Raises PeerUnreachable if there are some and none answers."""
        for relay in relays:
            try:
                async with asyncio.timeout(RELAY_TIMEOUT_S):
                    await self.daemon.control.connect(relay.rpartition("/p2p/")[2], (relay,))
                return
            except (TimeoutError, NetworkError) as error:
                logger.warning("the relay %s does not answer: %s", relay, error)
        if relays:
            raise PeerUnreachable(f"none of the relays answers, choose others: {', '.join(relays)}")

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.daemon.daemon.refresh()
            except NetworkError as error:
                logger.debug("the p2p daemon does not tell its addresses: %s", error)

    async def _probe(self, stream: FramedStream, addresses: Sequence[str], found: OnUpgrade) -> None:
        """Try a peer that is connected through the daemon directly, until it works or the stream is gone."""
        turn = 0
        while not await _gone_within(stream, PROBE_AFTER_S[min(turn, len(PROBE_AFTER_S) - 1)]):
            turn += 1
            try:
                better = await self._dial_directly(stream.peer, addresses)
            except PeerUnreachable as error:
                logger.debug("still not directly: %s", error)
                continue
            await found(stream, better)
            return


async def _gone_within(stream: FramedStream, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await stream.closed()
    except TimeoutError:
        return False
    return True
