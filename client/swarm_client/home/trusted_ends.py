"""Named nodes that hold the ends of the model for the clients of a household: they get token ids, and nobody else does.

They are nodes as others are, and the router sees to it that a chain begins and ends with them
(`planner.routing.rules`). Owns which edges between them and strangers the client forwards itself, so that these carry
what the edges of a client with the ends at home carry.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from swarm.config import ClientConfig
from swarm.errors import UsageError
from swarm.types import PeerId
from swarm_client.home.local_layers import NONE
from swarm_client.home.loopback import HomeLink

_PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{32,64}")  # base58


@dataclass(frozen=True, slots=True)
class TrustedEnds:
    """`peers`: the nodes. `client`: this peer, by which strangers know the hop beside them."""

    peers: frozenset[PeerId]
    client: PeerId
    hidden_size: int

    @property
    def links(self) -> Mapping[PeerId, HomeLink]:
        """There is none within this process."""
        return {}

    def hold(self, chain: Sequence[PeerId]) -> bool:
        """Whether strangers stand between a first and a last hop that are trusted."""
        return {chain[0], chain[-1]} <= self.peers and not self.peers.issuperset(chain)


def trusted_ends(config: ClientConfig, client: PeerId, hidden_size: int) -> TrustedEnds | None:
    """What `config.trust` says. Raises UsageError."""
    if not config.trust:
        return None
    check_trust(config.trust)
    if config.drafter == "tail":
        raise UsageError("a tail's drafter is not used between --trust ends; choose another --drafter")
    if config.local_layers != NONE:
        raise UsageError("--trust and --local-layers both say who holds the ends of the model; give one of them")
    return TrustedEnds(frozenset(config.trust), client, hidden_size)


def check_trust(peers: Collection[PeerId]) -> None:
    """Raises UsageError for what is no peer id."""
    for peer in peers:
        if not _PEER_ID.fullmatch(peer):
            raise UsageError(f"--trust {peer[:80]!r} is no peer id; `swarm-node join` prints its own as it starts")
