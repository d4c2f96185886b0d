"""Who of the connected peers uses this process, and has used it: what `eviction` and `frame_budgets` judge by.

Owns that memory. Pure but for the callback that is asked; callers pass the time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

from swarm.net.pool.eviction import EvictionPolicy, LinkFacts, LinkUse, NoRoom, victim
from swarm.types import PeerId


class TrackedLink(Protocol):
    """A live link. `since`: when it was opened, or last seen in use; `checked_at`: when `use` was found."""

    peer: PeerId
    outgoing: bool
    block: str
    use: LinkUse
    since: float
    checked_at: float


_T = TypeVar("_T", bound=TrackedLink)


class LinkUses:
    """`uses`: whether something that runs here needs the links with a peer; None: all that were dialed are needed, and
    those that were accepted are strangers'.

    `believed_s`: how long an answer of it is used. `max_former`: peers remembered as having used this process.
    """

    def __init__(self, uses: Callable[[PeerId], bool] | None, believed_s: float, max_former: int) -> None:
        self._uses = uses
        self._believed_s = believed_s
        self._max_former = max_former
        self._former: OrderedDict[PeerId, None] = OrderedDict()

    def of(self, link: TrackedLink, now: float) -> LinkUse:
        if now - link.checked_at < self._believed_s:
            return link.use
        link.checked_at = now
        if link.outgoing if self._uses is None else self._uses(link.peer):
            link.use, link.since = LinkUse.IN_USE, now
            self._former[link.peer] = None
            self._former.move_to_end(link.peer)
            if len(self._former) > self._max_former:
                self._former.popitem(last=False)
        elif link.outgoing:
            link.use = LinkUse.DIALED
        else:
            link.use = LinkUse.FORMER if link.peer in self._former else LinkUse.STRANGER
        return link.use

    def is_stranger(self, link: TrackedLink, now: float) -> bool:
        """Whether its peer connected to us and has nothing running here."""
        return self.of(link, now) <= LinkUse.FORMER

    def victim(
        self, links: Collection[_T], peer: PeerId, block: str | None, max_links: int, policy: EvictionPolicy, now: float
    ) -> _T | NoRoom | None:
        """See `eviction.victim`, for a connection with `peer`. `block`: None if it is we who dial."""
        facts = [LinkFacts(link, link.block, self.of(link, now), link.since) for link in links]
        needed = self._uses is not None and self._uses(peer)
        return victim(facts, None if needed else block, max_links, policy)
