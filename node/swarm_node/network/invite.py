"""How others join this node's swarm: the invitation, as text and as a QR code.

Owns which of our addresses go into it and how it is shown. The token's format is in `swarm.net.discovery.invite`.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from swarm.config import NodeConfig
from swarm.net.base.tls_addresses import is_direct, is_relayed, libp2p_addresses, listen_ip
from swarm.net.discovery.invite import Invite

MAX_ADDRESSES = 3  # of libp2p: a token should stay short enough for a message and a QR code
MAX_DIRECT = 2  # for clients that have no libp2p


def new_secret() -> str:
    """128 random bits as 22 characters."""
    return secrets.token_urlsafe(16)


def make_invite(config: NodeConfig, model: str, addresses: Sequence[str]) -> Invite:
    """`model`: its name in the directory, for those who do not have our file. Raises UsageError."""
    name = model if Path(config.model).expanduser().exists() else config.model
    return Invite(shareable(addresses), name, config.network, config.secret)


def how_to_join(config: NodeConfig, model: str, addresses: Sequence[str]) -> str:
    """The part of the "started" sentence for others. In a private swarm the invitation carries the secret."""
    if config.secret:
        return f"others join with --invite {make_invite(config, model, addresses).token()}"
    return f"others join with --peer {shareable(addresses)[0]}"


def shareable(addresses: Sequence[str]) -> tuple[str, ...]:
    """The few of a node's addresses that are the most useful to others: public, then relayed, then private; those of
    libp2p before direct ones.

    Loopback only if there is no other.
    """
    libp2p, direct = libp2p_addresses(addresses), tuple(filter(is_direct, addresses))
    outside = _best(libp2p, MAX_ADDRESSES)
    if outside:
        return (*outside, *_best(direct, MAX_DIRECT))
    return (*libp2p[:MAX_ADDRESSES], *(_best(direct, MAX_DIRECT) or direct[:MAX_DIRECT]))


def _best(addresses: Sequence[str], count: int) -> list[str]:
    """Without loopback."""
    return sorted((address for address in addresses if _rank(address) < _LOOPBACK), key=_rank)[:count]


def show(invite: Invite, as_json: bool) -> None:
    """Print the token, how to use it and, to a person, a QR code of it."""
    token = invite.token()
    if as_json:
        fields = {"invite": token, "model": invite.model, "network": invite.network, "peers": invite.peers}
        sys.stdout.write(json.dumps({**fields, "private": bool(invite.secret)}) + "\n")
        return
    if sys.stdout.isatty():
        import segno

        segno.make(token, error="l").terminal(compact=True)
    name = f" {invite.network}" if invite.network else ""
    kind = "private swarm; whoever has this invitation is in it" if invite.secret else "open swarm"
    sys.stdout.write(
        f"{token}\n\nThis invites to the{name} {kind}, for {invite.model}.\n\n"
        "  swarm-node join --invite TOKEN     lend a machine\n"
        "  swarm-chat --invite TOKEN          ask\n"
    )
    if all(_rank(peer) == _LOOPBACK for peer in invite.peers):
        sys.stdout.write("\nIts addresses are of this machine alone: nobody else can join by it.\n")


_PUBLIC, _RELAYED, _PRIVATE, _LOOPBACK = range(4)


def _rank(address: str) -> int:
    host = listen_ip(address)
    if is_relayed(address):
        return _RELAYED
    if host is None:
        return _PUBLIC  # a name
    ip = ipaddress.ip_address(host)
    if ip.is_loopback:
        return _LOOPBACK
    return _PRIVATE if ip.is_private or ip.is_link_local else _PUBLIC
