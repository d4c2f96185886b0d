"""Whose sessions and whose reserved KV memory make room for a newcomer, when a node is full.

A share may hold more than its part while nobody needs it. When somebody does, who holds less than an equal part, the
share that holds most gives back: first what it has reserved and does not use, then the sessions that were idle for
longest. Nobody within its part loses anything, but for reservations that were not used for a while. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from swarm.planner.scheduling.fair_shares import Share


@dataclass(frozen=True, slots=True)
class ReclaimPolicy:
    unused_after_s: float = 20.0
    """A session without a step for so long keeps only the memory that it uses, if others need the rest."""
    slack_tokens: int = 64
    """What a session keeps reserved beyond what it uses: steps without a look for free blocks against memory."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one session holds. `idle_s`: since its last step. Tokens of KV memory in each layer."""

    key: int
    share: Share
    idle_s: float
    reserved: int
    used: int


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """`shrink`: session -> the tokens it keeps reserved. `end`: the sessions to end."""

    shrink: dict[int, int]
    end: tuple[int, ...] = ()


def reclaim_slot(holdings: Sequence[Holding], share: Share, most: int) -> int | None:
    """The session to end so that `share` gets one of `most` sessions; None if all shares are within their part."""
    counts = Counter(_party(holding.share) for holding in holdings)
    part = most / len({*counts, _party(share)})
    if counts[_party(share)] + 1 > part and not share.first:
        return None
    return next((holding.key for holding in _in_order(holdings, share, counts) if _over(counts, holding, part)), None)


def reclaim_tokens(
    holdings: Sequence[Holding], share: Share, tokens: int, capacity: int, policy: ReclaimPolicy = ReclaimPolicy()
) -> Reclaimed | None:
    """How `share` gets `tokens` more; None if that takes more than the others' surplus."""
    held: Counter[Hashable] = Counter()
    for holding in holdings:
        held[_party(holding.share)] += holding.reserved
    part = capacity / len({*held, _party(share)})
    below = share.first or held[_party(share)] + tokens <= part
    shrink: dict[int, int] = {}
    end: list[int] = []
    order = list(_in_order(holdings, share, held))
    for holding in order:
        kept = holding.used + policy.slack_tokens
        unused = holding.idle_s >= policy.unused_after_s or (below and _over(held, holding, part))
        if tokens > 0 and unused and kept < holding.reserved:
            shrink[holding.key] = kept
            tokens -= holding.reserved - kept
            held[_party(holding.share)] -= holding.reserved - kept
    for holding in order:
        if tokens > 0 and below and _over(held, holding, part):
            freed = shrink.pop(holding.key, holding.reserved)
            end.append(holding.key)
            tokens -= freed
            held[_party(holding.share)] -= freed
    return Reclaimed(shrink, tuple(end)) if tokens <= 0 else None


def newcomer_tokens(holdings: Sequence[Holding], free: int, capacity: int) -> int:
    """The tokens that a client which holds nothing could reserve now: what is free, or its part of what others hold."""
    held: Counter[Hashable] = Counter()
    for holding in holdings:
        held[_party(holding.share)] += holding.reserved
    part = capacity / (len(held) + 1)
    surplus = sum(max(0.0, tokens - part) for tokens in held.values())
    return max(free, int(min(part, free + surplus)))


def _in_order(holdings: Iterable[Holding], share: Share, held: Counter[Hashable]) -> list[Holding]:
    """Those of others than `share` and the owner: of the largest holder first, the longest idle first."""
    others = [holding for holding in holdings if _party(holding.share) != _party(share) and not holding.share.first]
    return sorted(others, key=lambda holding: (-held[_party(holding.share)], -holding.idle_s, holding.key))


def _over(held: Counter[Hashable], holding: Holding, part: float) -> bool:
    return held[_party(holding.share)] > part


def _party(share: Share) -> Hashable:
    """A block is one party, however many identities it has."""
    return share.block
