"""Swarms of the local network: announced and heard by multicast DNS.

Owns what is announced (a few addresses, for one network name and model) and the hearing of it. Members of a private
swarm announce sealed bytes: whoever lacks the secret learns that some swarm is here, not which, nor its addresses.
Nothing heard is believed: whoever answers at an address proves its peer id, and in a private swarm that it is a member.
Knows neither transports nor the DHT.
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
FIND_S = 1.5  # to listen for others before one begins a swarm of one's own
ANSWER_S = 1.0  # for what an announcement says to arrive
DIAL_S = 0.5  # for a TCP connection in the local network
MAX_HEARD = 64  # announcements that are looked at
MAX_ADDRESSES = 3
PIECE = 200  # bytes of one TXT value, which holds 255 with its key

Heard = Callable[[tuple[str, ...]], Awaitable[object]]
"""Awaited with the addresses of each other member that is heard, multiaddrs that end in `/p2p/<peer id>`."""


@dataclass(frozen=True, slots=True)
class SwarmTag:
    """Whose announcements concern us: those of the same network name, model and secret."""

    network: str
    model: str
    secret: SwarmSecret | None = None

    @classmethod
    def of(cls, network: str, model: str, secret: SwarmSecret | None) -> SwarmTag:
        """`model`: as in a config, a name or the path of one's own file, of which others know but the name."""
        path = Path(model).expanduser()
        return cls(network, path.stem if path.exists() else model, secret)

    def encode(self, addresses: Sequence[str]) -> dict[str, bytes]:
        """What to announce, as the values of a TXT record."""
        data = "\n".join(addresses[:MAX_ADDRESSES]).encode()
        open_ = {"network": self.network.encode()[:PIECE], "model": self.model.encode()[:PIECE]}
        if self.secret is not None:
            data, open_ = self.secret.seal(data, self._about()), {}
        pieces = {f"d{i // PIECE}": data[i : i + PIECE] for i in range(0, len(data), PIECE)}
        return {**open_, **pieces}

    def decode(self, said: dict[str, bytes]) -> tuple[str, ...]:
        """The addresses in an announcement of this group; none if it is of another, or nonsense."""
        data = b"".join(said.get(f"d{i}", b"") for i in range(MAX_ADDRESSES + 1))
        if self.secret is not None:
            try:
                data = self.secret.unseal(data, self._about())
            except ProtocolError:
                return ()
        elif said.get("network") != self.network.encode()[:PIECE] or said.get("model") != self.model.encode()[:PIECE]:
            return ()
        try:
            return HostOptions(peers=tuple(data.decode().splitlines()[:MAX_ADDRESSES])).peers
        except (UnicodeDecodeError, UsageError):
            return ()

    def _about(self) -> bytes:
        return f"local {self.network} {self.model}".encode()


class MdnsService:
    """Hears the others of a group, and says where we are. Made by `await Neighbourhood.start(...)`; `close` it."""

    def __init__(self, group: SwarmTag, heard: Heard, mdns: AsyncZeroconf) -> None:
        self._group = group
        self._heard = heard
        self._mdns = mdns
        self._own = f"{os.urandom(8).hex()}.{SERVICE}"
        self._known: set[str] = set()
        self._tasks = TaskSet("neighbourhood")
        self._browser = AsyncServiceBrowser(mdns.zeroconf, SERVICE, handlers=[self._changed])

    @classmethod
    async def start(cls, group: SwarmTag, heard: Heard, interfaces: Sequence[str] | None = None) -> MdnsService:
        """Listen on all interfaces, or on those with these IP addresses. Raises OSError where that cannot be done."""
        return cls(group, heard, AsyncZeroconf(interfaces=list(interfaces)) if interfaces else AsyncZeroconf())

    async def advertise(self, addresses: Sequence[str]) -> None:
        """Say where we are from now on. What only this machine can dial is of no use to others."""
        hosts = [host for address in addresses if (host := listen_ip(address)) is not None]
        info = ServiceInfo(
            SERVICE,
            self._own,
            port=1,  # unused: the addresses have theirs
            properties=self._group.encode(addresses),
            server=f"{os.urandom(8).hex()}.local.",
            addresses=[socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host) for host in hosts],
        )
        try:
            await (await self._mdns.async_register_service(info, cooperating_responders=True))
        except (ZeroconfError, NonUniqueNameException, OSError) as error:
            logger.info("the local network is not told of us: %s", error)

    async def close(self) -> None:
        await self._tasks.close()
        await self._browser.async_cancel()
        await self._mdns.async_close()

    def _changed(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: Any) -> None:
        if name not in self._known and name != self._own and len(self._known) < MAX_HEARD:
            self._known.add(name)
            self._tasks.start(self._look_at(zeroconf, name), "announcement")

    async def _look_at(self, zeroconf: Zeroconf, name: str) -> None:
        try:
            info = AsyncServiceInfo(SERVICE, name)
            await info.async_request(zeroconf, ANSWER_S * 1e3)
        except (ZeroconfError, OSError) as error:
            logger.debug("an announcement that cannot be read: %s", error)
            return
        said = {key.decode(errors="replace"): value or b"" for key, value in info.properties.items()}
        addresses = self._group.decode(said)
        if addresses:
            await self._heard(addresses)


async def browse(group: SwarmTag, interfaces: Sequence[str] | None = None, wait_s: float = FIND_S) -> tuple[str, ...]:
    """Addresses of members nearby that take connections, as soon as one does; none if nobody is heard in `wait_s`."""
    found: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()

    async def try_them(addresses: tuple[str, ...]) -> None:
        alive = tuple([address for address in addresses if await _answers(address)])
        if alive and not found.done():
            found.set_result(alive)

    try:
        neighbourhood = await MdnsService.start(group, try_them, interfaces)
    except OSError as error:
        logger.info("cannot look for a swarm in the local network: %s", error)
        return ()
    try:
        async with asyncio.timeout(wait_s):
            return await found
    except TimeoutError:
        return ()
    finally:
        await neighbourhood.close()


async def _answers(address: str) -> bool:
    """Whether somebody listens there: an announcement outlives its maker by up to two minutes."""
    host, parts = listen_ip(address), address.split("/")
    if host is None or parts[3] != "tcp" or not ipaddress.ip_address(host).is_private:
        return False  # nobody in the local network has us dial the world
    try:
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(host, int(parts[4]))
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return True
