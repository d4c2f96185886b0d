"""Dials the peers that clients name: next hops, and nodes to fetch keys and values from.

A client names a peer and nothing else. Where that peer can be dialed is in its own signed record, which this node has
read from the directory and verified: a client cannot have a node dial hosts and ports of its choice. Owns which dials
are under way for whom, and which peers have just failed. Knows no sessions; where no dial is made, the client relays.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from swarm.errors import PeerUnreachable
from swarm.token_bucket import KeyedBuckets
from swarm.types import PeerId
from swarm_hop.serving.links import LinkSource
from swarm_hop.serving.session import PeerChannel

AddressesOf = Callable[[PeerId], Awaitable[Sequence[str] | None]]
"""The addresses in a peer's verified record; None if it has none."""


@dataclass(frozen=True, slots=True)
class DialPolicy:
    """Dials that clients cause: direct edges between hops against dials that lead nowhere. Times in seconds."""

    max_dials: int = 16  # under way for all clients
    max_dials_per_client: int = 4  # a chain that is opened needs one on each hop, and a few chains may open at once
    failures_per_s: float = 0.1  # of one client's dials, on average ...
    failure_burst: float = 8.0  # ... and at once: nodes that died together, of which it has not heard
    backoff_s: float = 1.0  # before a peer that failed is dialed again; doubles with each failure in a row
    max_backoff_s: float = 16.0
    max_remembered: int = 1024  # peers that failed, and clients


async def no_records(peer: PeerId) -> Sequence[str] | None:
    """For a node without a directory: peers are dialed by their id, wherever the transport knows them."""
    return ()


class HopDialer:
    """One a node. `await get(client, peer)`."""

    def __init__(
        self, links: LinkSource, addresses_of: AddressesOf, timeout_s: float, policy: DialPolicy = DialPolicy()
    ) -> None:
        self._links = links
        self._addresses_of = addresses_of
        self._timeout_s = timeout_s
        self._policy = policy
        self._under_way: dict[PeerId, set[PeerId]] = {}  # peer -> the clients who wait for it
        self._failed: OrderedDict[PeerId, tuple[int, float]] = OrderedDict()  # -> failures in a row, not before
        self._failures = KeyedBuckets(policy.failures_per_s, policy.failure_burst, policy.max_remembered)

    async def get(self, client: PeerId, peer: PeerId) -> PeerChannel:
        """The link to `peer`, dialed for `client` if there is none. Raises PeerUnreachable."""
        if self._links.has_dialled(peer):
            return await self._links.get(peer)
        self._check(client, peer)
        waiting = self._under_way.setdefault(peer, set())
        waiting.add(client)
        try:
            async with asyncio.timeout(self._timeout_s):
                addresses = await self._addresses_of(peer)
                if addresses is None:
                    raise PeerUnreachable(f"{peer} has no record that this node has seen")
                link = await self._links.get(peer, addresses, self._timeout_s)
        except (TimeoutError, PeerUnreachable) as error:
            self._fail(client, peer)
            raise PeerUnreachable(str(error) or f"{peer} was not reached within {self._timeout_s:g} s") from None
        finally:
            waiting.discard(client)
            if not waiting:
                self._under_way.pop(peer, None)
        self._failed.pop(peer, None)
        return link

    def _check(self, client: PeerId, peer: PeerId) -> None:
        """Raises PeerUnreachable if no dial to `peer` may begin now."""
        policy, now = self._policy, asyncio.get_running_loop().time()
        if now < self._failed.get(peer, (0, now))[1]:
            raise PeerUnreachable(f"{peer} was just dialed in vain")
        if not self._failures.take(client, 0.0, now):
            raise PeerUnreachable("too many peers that this client named were not reached")
        if peer not in self._under_way:  # else the dial is shared
            own = sum(1 for clients in self._under_way.values() if client in clients)
            if own >= policy.max_dials_per_client or len(self._under_way) >= policy.max_dials:
                raise PeerUnreachable("too many dials are under way")

    def _fail(self, client: PeerId, peer: PeerId) -> None:
        policy, now = self._policy, asyncio.get_running_loop().time()
        self._failures.spend(client, 1.0, now)
        failures = self._failed.pop(peer, (0, 0.0))[0] + 1
        self._failed[peer] = failures, now + min(policy.max_backoff_s, policy.backoff_s * 2.0 ** (failures - 1))
        if len(self._failed) > policy.max_remembered:
            self._failed.popitem(last=False)
