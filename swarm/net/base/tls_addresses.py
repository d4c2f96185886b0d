"""Addresses of the TLS transport: `/ip4/192.0.2.1/tcp/4001/tls/p2p/<peer id>`.

Owns that notation and which of a machine's addresses to advertise. In a record they stand beside the addresses of the
libp2p host, which ignores `/tls`. Opens no socket.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.types import PeerId

MAX_ADVERTISED = 3  # a record has room for eight addresses in all


@dataclass(frozen=True, slots=True)
class TlsEndpoint:
    """An IP address, written as text, and a TCP port."""

    host: str
    port: int

    def address(self, peer: PeerId) -> str:
        kind = "ip6" if ":" in self.host else "ip4"
        return f"/{kind}/{self.host}/tcp/{self.port}/tls/p2p/{peer}"


def is_direct(address: str) -> bool:
    return "/tls/p2p/" in address


def libp2p_addresses(addresses: Iterable[str]) -> tuple[str, ...]:
    """Those that a libp2p host can dial."""
    return tuple(address for address in addresses if not is_direct(address))


def by_peer(addresses: Iterable[str]) -> dict[PeerId, tuple[str, ...]]:
    """Multiaddrs by the peer that each ends in."""
    found: dict[PeerId, list[str]] = {}
    for address in addresses:
        found.setdefault(address.rpartition("/p2p/")[2], []).append(address)
    return {peer: tuple(of) for peer, of in found.items()}


def is_relayed(address: str) -> bool:
    return "/p2p-circuit" in address


def parse(address: str, peer: PeerId) -> TlsEndpoint | None:
    """The endpoint of a TLS address of `peer`; None for any other text."""
    match address.split("/"):
        case ["", "ip4" | "ip6", host, "tcp", port, "tls", "p2p", owner] if owner == peer and re.fullmatch(
            r"[0-9]{1,5}", port
        ):
            ip = _ip(host)
            return TlsEndpoint(host, int(port)) if ip is not None and 0 < int(port) < 1 << 16 else None
    return None


def listen_ip(address: str) -> str | None:
    """The IP address at the front of a multiaddr; None if it has none."""
    parts = address.split("/")
    return parts[2] if len(parts) > 2 and parts[1] in ("ip4", "ip6") and _ip(parts[2]) is not None else None


def is_loopback(address: str) -> bool:
    """Whether only this machine can dial it."""
    host = listen_ip(address)
    return host is not None and ipaddress.ip_address(host).is_loopback


def advertised(bound: Sequence[TlsEndpoint], host_addresses: Iterable[str]) -> list[TlsEndpoint]:
    """Where others may dial the sockets in `bound`, given the addresses at which the libp2p host is reachable.

    Loopback only if there is nothing else; public addresses first.
    """
    found: dict[str, TlsEndpoint] = {}
    for address in host_addresses:
        host = listen_ip(address)
        if host is None or is_relayed(address):
            continue
        for socket in bound:
            if socket.host == host or (ipaddress.ip_address(socket.host).is_unspecified and _same_family(socket, host)):
                found.setdefault(host, TlsEndpoint(host, socket.port))
    ips = {host: ipaddress.ip_address(host) for host in found}
    outside = [host for host in found if not (ips[host].is_loopback or ips[host].is_link_local)]
    chosen = sorted(outside or found, key=lambda host: ips[host].is_private)
    return [found[host] for host in chosen[:MAX_ADVERTISED]]


def _same_family(socket: TlsEndpoint, host: str) -> bool:
    return (":" in socket.host) == (":" in host)


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
