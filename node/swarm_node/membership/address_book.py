"""Where the swarm's nodes can be dialed, by their own signed records: what a node dials when a client names a peer.

Owns the last snapshot that was read for this, and how often one is read. Reads only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from swarm.errors import NetworkError
from swarm.types import PeerId, Snapshot


@dataclass(frozen=True, slots=True)
class AddressBookPolicy:
    """Fresh addresses of nodes that restart or have just come, against reads of the directory."""

    max_age_s: float = 5.0  # of an address that is used
    min_interval_s: float = 1.0  # between two reads, however many unknown peers clients name


class AddressBook:
    """`snapshot()`: the verified records of the swarm now; raises NetworkError."""

    def __init__(
        self, snapshot: Callable[[], Awaitable[Snapshot]], policy: AddressBookPolicy = AddressBookPolicy()
    ) -> None:
        self._snapshot = snapshot
        self._policy = policy
        self._known: dict[PeerId, tuple[str, ...]] = {}
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def of(self, peer: PeerId) -> Sequence[str] | None:
        """The addresses in the record of `peer`; None if there is no such record."""
        if peer not in self._known or self._age_s() > self._policy.max_age_s:
            async with self._reading:
                if self._age_s() > self._policy.min_interval_s:
                    await self._read()
        return self._known.get(peer)

    async def _read(self) -> None:
        try:
            nodes = (await self._snapshot()).nodes
        except NetworkError:
            return  # those known so far will do
        finally:
            self._read_at = asyncio.get_running_loop().time()
        self._known = {node.peer: node.addresses for node in nodes}

    def _age_s(self) -> float:
        return asyncio.get_running_loop().time() - self._read_at
