"""Discovery of swarms in the local network, by multicast DNS.

Owns the announcement (a few addresses, for one network name and model) and the browsing for it. Members of a private
swarm announce sealed bytes: without the secret one learns that some swarm is here, not which, nor its addresses.
Announcements are not trusted: the peer at an address authenticates itself, in a private swarm also as a member. Knows
neither transports nor the DHT.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroconf import Error as ZeroconfError
from zeroconf import NonUniqueNameException, ServiceInfo, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from swarm.errors import ProtocolError, UsageError
from swarm.net.base.tasks import TaskSet
from swarm.net.base.tls_addresses import listen_ip
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.swarm_secret import SwarmSecret

logger = logging.getLogger(__name__)

SERVICE = "_swarm-llm._tcp.local."
MAX_ADDRESSES = 5  # of one announcement: three of libp2p and two direct ones
TXT_BYTES = 200  # of one TXT value, which holds 255 with its key

OnDiscovered = Callable[[tuple[str, ...]], Awaitable[object]]
"""Awaited with the addresses of each other member that is discovered, multiaddrs that end in `/p2p/<peer id>`."""


@dataclass(frozen=True, slots=True)
class MdnsPolicy:
    """Timeouts in the local network, in seconds, and the limit of announcements."""

    browse_timeout_s: float = (
        1.5  # before one starts a swarm of one's own: a slow start against two swarms in one place
    )
    resolve_timeout_s: float = 1.0  # for the records of an announcement
    dial_timeout_s: float = 0.5  # for a TCP connection in the local network
    max_announcements: int = 64  # resolved in all: many members against a flood


@dataclass(frozen=True, slots=True)
class SwarmTag:
    """Selects the announcements of our swarm: those with the same network name, model and secret."""

    network: str
    model: str
    secret: SwarmSecret | None = None

    @classmethod
    def of(cls, network: str, model: str, secret: SwarmSecret | None) -> SwarmTag:
        """`model`: as in a config, a name or the path of a local file, of which only the name is announced."""
        path = Path(model).expanduser()
        return cls(network, path.stem if path.exists() else model, secret)

    def encode(self, addresses: Sequence[str]) -> dict[str, bytes]:
        """What to announce, as the values of a TXT record."""
        data = "\n".join(addresses[:MAX_ADDRESSES]).encode()
        public = self._public()
        if self.secret is not None:
            data, public = self.secret.seal(data, self._context()), {}
        chunks = {f"d{i // TXT_BYTES}": data[i : i + TXT_BYTES] for i in range(0, len(data), TXT_BYTES)}
        return {**public, **chunks}

    def decode(self, values: dict[str, bytes]) -> tuple[str, ...]:
        """The addresses in an announcement of this swarm; none if it is of another swarm, or malformed."""
        data = b"".join(values.get(f"d{i}", b"") for i in range(MAX_ADDRESSES + 1))
        if self.secret is not None:
            try:
                data = self.secret.unseal(data, self._context())
            except ProtocolError:
                return ()
        elif any(values.get(key) != value for key, value in self._public().items()):
            return ()
        try:
            return HostOptions(peers=tuple(data.decode().splitlines()[:MAX_ADDRESSES])).peers
        except (UnicodeDecodeError, UsageError):
            return ()

    def _public(self) -> dict[str, bytes]:
        return {"network": self.network.encode()[:TXT_BYTES], "model": self.model.encode()[:TXT_BYTES]}

    def _context(self) -> bytes:
        return f"local {self.network} {self.model}".encode()


class MdnsService:
    """Discovers the other members of a swarm, and announces us. Made by `await MdnsService.start(...)`; `close` it."""

    def __init__(self, tag: SwarmTag, on_discovered: OnDiscovered, mdns: AsyncZeroconf, policy: MdnsPolicy) -> None:
        self._tag = tag
        self._on_discovered = on_discovered
        self._mdns = mdns
        self._policy = policy
        self._own = f"{os.urandom(8).hex()}.{SERVICE}"
        self._seen: set[str] = set()
        self._tasks = TaskSet("mdns")
        self._browser = AsyncServiceBrowser(mdns.zeroconf, SERVICE, handlers=[self._on_change])

    @classmethod
    async def start(
        cls,
        tag: SwarmTag,
        on_discovered: OnDiscovered,
        interfaces: Sequence[str] | None = None,
        policy: MdnsPolicy = MdnsPolicy(),
    ) -> MdnsService:
        """Listen on all interfaces, or on those with these IP addresses. Raises OSError if that is not possible."""
        mdns = AsyncZeroconf(interfaces=list(interfaces)) if interfaces else AsyncZeroconf()
        return cls(tag, on_discovered, mdns, policy)

    async def advertise(self, addresses: Sequence[str]) -> None:
        """Announce `addresses` from now on. Those that only this machine can dial are of no use to others."""
        hosts = [host for address in addresses if (host := listen_ip(address)) is not None]
        info = ServiceInfo(
            SERVICE,
            self._own,
            port=1,  # unused: the addresses have theirs
            properties=self._tag.encode(addresses),
            server=f"{os.urandom(8).hex()}.local.",
            addresses=[socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host) for host in hosts],
        )
        try:
            await (await self._mdns.async_register_service(info, cooperating_responders=True))
        except (ZeroconfError, NonUniqueNameException, OSError) as error:
            logger.info("cannot announce this node in the local network: %s", error)

    async def close(self) -> None:
        await self._tasks.close()
        await self._browser.async_cancel()
        await self._mdns.async_close()

    def _on_change(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: Any) -> None:
        if name not in self._seen and name != self._own and len(self._seen) < self._policy.max_announcements:
            self._seen.add(name)
            self._tasks.start(self._resolve(zeroconf, name), "announcement")

    async def _resolve(self, zeroconf: Zeroconf, name: str) -> None:
        try:
            info = AsyncServiceInfo(SERVICE, name)
            await info.async_request(zeroconf, self._policy.resolve_timeout_s * 1e3)
        except (ZeroconfError, OSError) as error:
            logger.debug("cannot resolve an announcement: %s", error)
            return
        values = {key.decode(errors="replace"): value or b"" for key, value in info.properties.items()}
        addresses = self._tag.decode(values)
        if addresses:
            await self._on_discovered(addresses)


async def browse(
    tag: SwarmTag, interfaces: Sequence[str] | None = None, policy: MdnsPolicy = MdnsPolicy()
) -> tuple[str, ...]:
    """Addresses of members nearby that accept connections, as soon as one does; none within the browse timeout."""
    found: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()

    async def check(addresses: tuple[str, ...]) -> None:
        alive = tuple([address for address in addresses if await _accepts(address, policy.dial_timeout_s)])
        if alive and not found.done():
            found.set_result(alive)

    try:
        service = await MdnsService.start(tag, check, interfaces, policy)
    except OSError as error:
        logger.info("cannot look for a swarm in the local network: %s", error)
        return ()
    try:
        async with asyncio.timeout(policy.browse_timeout_s):
            return await found
    except TimeoutError:
        return ()
    finally:
        await service.close()


async def _accepts(address: str, timeout_s: float) -> bool:
    """Whether a TCP port is open there: an announcement outlives its node by up to two minutes."""
    host, parts = listen_ip(address), address.split("/")
    if host is None or parts[3] != "tcp" or not ipaddress.ip_address(host).is_private:
        return False  # an announcement must not make us dial addresses outside the local network
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, int(parts[4]))
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return True
