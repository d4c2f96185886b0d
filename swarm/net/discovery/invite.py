"""Invites: all that a new node or client needs to join a swarm, in one string to paste.

    token = "swarm1" + base58(version | MessagePack of an `Invite`'s fields | checksum of 4 bytes)

Owns that format. A token is not authenticated: trust it as far as whoever sent it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import base58
import msgspec
from msgspec import Meta

from swarm.errors import UNDECODABLE, UsageError
from swarm.net.base import multiaddr

PREFIX = "swarm1"
VERSION = 1
MAX_PEERS = 8
MAX_TOKEN = 4096  # characters

_Text = Annotated[str, Meta(max_length=256)]


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """The payload of a token; addresses are binary. Later versions may add fields at the end."""

    peers: Annotated[list[Annotated[bytes, Meta(max_length=256)]], Meta(min_length=1, max_length=MAX_PEERS)]
    model: _Text
    network: _Text = ""
    secret: _Text = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Packed).decode


@dataclass(frozen=True, slots=True)
class Invite:
    """`peers`: multiaddrs of bootstrap peers. `network`: the swarm's name for people. `secret`: "" if open."""

    peers: tuple[str, ...]
    model: str
    network: str = ""
    secret: str = ""

    def token(self) -> str:
        """Raises UsageError if a peer is not a multiaddr that ends in a peer id."""
        packed = _Packed([_to_bytes(peer) for peer in self.peers[:MAX_PEERS]], self.model, self.network, self.secret)
        return PREFIX + base58.b58encode_check(bytes([VERSION]) + _encode(packed)).decode()

    def settings(self) -> dict[str, Any]:
        """The config settings of this invite."""
        found = {"peers": self.peers, "model": self.model, "network": self.network, "secret": self.secret}
        return {name: value for name, value in found.items() if value}


def parse(token: str) -> Invite:
    """Raises UsageError with what is wrong with the token."""
    text = "".join(token.split())  # pasting may add line breaks
    if not text.startswith(PREFIX) or len(text) > MAX_TOKEN:
        raise UsageError(
            f"'{token[:20]}' is not an invitation: one begins with {PREFIX}; paste all that was sent to you"
        )
    try:
        data = base58.b58decode_check(text[len(PREFIX) :])
    except ValueError:
        raise UsageError("the invitation is damaged: a character is missing or was changed; paste it again") from None
    if not data or data[0] != VERSION:
        raise UsageError("the invitation is for another version of swarm; update, or ask for a new one")
    try:
        packed = _decode(data[1:])
        peers = tuple(multiaddr.from_bytes(peer) for peer in packed.peers)
    except (*UNDECODABLE, ValueError) as error:
        raise UsageError(f"the invitation makes no sense: {error}") from None
    invite = Invite(peers, packed.model, packed.network, packed.secret)
    for peer in peers:
        _to_bytes(peer)
    if not all(text.isprintable() for text in (invite.model, invite.network, invite.secret)) or not invite.model:
        raise UsageError("the invitation makes no sense: a name in it is not text")
    return invite


def _to_bytes(peer: str) -> bytes:
    try:
        names = multiaddr.protocols(peer)
    except ValueError as error:
        raise UsageError(f"'{peer}' is not a multiaddr: {error}") from None
    if not names or names[-1] != "p2p":
        raise UsageError(f"'{peer}' does not say which peer it is; it must end in /p2p/<peer id>")
    return multiaddr.to_bytes(peer)
