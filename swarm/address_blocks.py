"""The block of addresses that one host or one customer of a network gets, so that its identities can be counted as one.

Owns the sizes of those blocks: small ones for addresses that were seen, which one must have to be seen there; large
ones for those that a record claims, which cost nothing. Knows no connections.
"""

from __future__ import annotations

import functools
import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")

UNKNOWN_BLOCK = ""
"""Of a peer that nobody here has seen, or only through a relay."""

_PUBLIC_IPV4_BITS = 24
_PUBLIC_IPV6_BITS = 48  # what a site gets; a home often gets /56
_CLAIMED_BITS = {4: 16, 6: 32}  # what one network has, mostly


def block_of_ip(ip: str) -> str:
    """`"198.51.100.7"` -> `"198.51.100.0/24"`; UNKNOWN_BLOCK if it is no address.

    An address that is not public (loopback, a LAN, a provider's NAT) stands for itself: the machines of one LAN are
    neighbors, not one owner.
    """
    address = _parsed(ip)
    if address is None:
        return UNKNOWN_BLOCK
    if not address.is_global:
        return str(address)
    bits = _PUBLIC_IPV4_BITS if address.version == 4 else _PUBLIC_IPV6_BITS
    return str(ipaddress.ip_network((address, bits), strict=False))


def _parsed(ip: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(ip.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


@functools.lru_cache(maxsize=8192)
def claimed_block(addresses: tuple[str, ...]) -> str:
    """The block of the first public IP address among the multiaddrs of a record, such as "203.0.0.0/16"; UNKNOWN_BLOCK
    if there is none.

    Machines of one home or LAN have private addresses and share no block, so that nobody answers for a neighbor.
    """
    for multiaddr in addresses:
        parts = multiaddr.split("/", 4)
        if len(parts) < 5 or parts[1] not in ("ip4", "ip6") or "/p2p-circuit" in multiaddr:  # a relay's address
            continue
        address = _parsed(parts[2])
        if address is not None and address.is_global:
            return str(ipaddress.ip_network((address, _CLAIMED_BITS[address.version]), strict=False))
    return UNKNOWN_BLOCK


def is_local(block: str) -> bool:
    """Whether a block is one machine's address that is not public."""
    return block != UNKNOWN_BLOCK and "/" not in block


def block_of_multiaddr(multiaddr: str) -> str:
    """Of the host that `/ip4/198.51.100.7/tcp/4001/...` names; UNKNOWN_BLOCK behind a relay, or of a domain."""
    parts = multiaddr.split("/", 3)
    if len(parts) < 3 or parts[1] not in ("ip4", "ip6") or "/p2p-circuit" in multiaddr:
        return UNKNOWN_BLOCK
    return block_of_ip(parts[2])


def is_public_block(block: str) -> bool:
    """Whether it is a block of public addresses: a LAN's machines, or this one, are nobody's attempt to be many."""
    return "/" in block


def spread(
    candidates: Iterable[_T], places: int, block_of: Callable[[_T], str], most: Callable[[str], float]
) -> list[_T]:
    """The first `places` of `candidates`, of a block at most `most(block)` (but one) while there are others."""
    used: Counter[str] = Counter()
    chosen: list[_T] = []
    over: list[_T] = []
    for candidate in candidates:
        block = block_of(candidate)
        used[block] += 1
        (chosen if used[block] <= max(1.0, most(block)) else over).append(candidate)
    return [*chosen, *over][:places]
