"""The options of a libp2p host, checked before one is started. Owns the rules of its addresses; starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.errors import UsageError
from swarm.net.base import multiaddr


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Multiaddrs: where to listen, which peers to join (each ends in `/p2p/<peer id>`), what to advertise instead.

    `relays`: peers that relay connections to a machine that cannot be dialled. `relay_server`: relay for others.
    """

    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    peers: tuple[str, ...] = ()
    advertise: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    relay_server: bool = False

    def __post_init__(self) -> None:
        """Raises UsageError."""
        _check(self)


def _check(options: HostOptions) -> None:
    for flag in ("listen", "advertise", "peers", "relays"):
        addresses: tuple[str, ...] = getattr(options, flag)
        for text in addresses:
            try:
                names = multiaddr.protocols(text)
            except ValueError as error:
                raise UsageError(f"'{text}' is not a multiaddr: {error}") from None
            if flag in ("peers", "relays") and (not names or names[-1] != "p2p"):
                raise UsageError(f"'{text}' does not say which peer it is; it must end in /p2p/<peer id>")
    if options.relays and options.relay_server:
        raise UsageError("a machine that needs a relay cannot be one: give either --relay-via or --relay-server")
    if not options.listen:
        raise UsageError("no address to listen on; /ip4/0.0.0.0/tcp/0 is any port on all networks")


def same_ports(listen: Sequence[str], addresses: Sequence[str]) -> tuple[str, ...]:
    """`listen` with the ports that `addresses` show in place of 0."""
    return tuple(
        next((kept for a in addresses if (kept := _with_port_of(requested, a))), requested) for requested in listen
    )


def _with_port_of(requested: str, address: str) -> str:
    """`/ip4/0.0.0.0/tcp/0` and `/ip4/10.0.0.1/tcp/4001/p2p/...` -> `/ip4/0.0.0.0/tcp/4001`; "" if they differ."""
    ours, theirs = requested.split("/"), address.split("/")
    if len(ours) < 5 or ours[4] != "0" or len(theirs) < 5:
        return ""
    same_host = ours[2] == theirs[2] or ours[2] in ("0.0.0.0", "::")
    same_rest = ours[1] == theirs[1] and ours[3] == theirs[3] and ours[5:] == theirs[5 : len(ours)]
    return "/".join((*ours[:4], theirs[4], *ours[5:])) if same_host and same_rest else ""
