"""Records that a reader was offered and has not verified yet: how many wait, and which are verified first.

A signature takes a tenth of a millisecond to check, and anybody makes any number of records. So a reader verifies a
bounded number a second: first newer records of peers that it knows, the longest known first, then some of those that
it does not know, of each kind of source in turn. What is not verified now is offered again by the next read.

Owns the order and the bounds. Knows no clock, keys or network; what a record says is `records`'.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swarm.token_bucket import TokenBucket
from swarm.types import PeerId

DIRECTORY = ""
"""The source of records that the DHT has; otherwise it is the peer that passed one on."""


@dataclass(frozen=True, slots=True)
class RecordIntakePolicy:
    """What verifying costs against how fresh the records are. A verification takes about 0.15 ms of a core."""

    per_s: float = 100.0  # 2% of a core; 150 nodes that publish every 1.5 s are as fresh as can be, 1,000 every 10 s
    newcomers_per_s: float = 16.0  # of these, peers that are not known yet
    urgent_share: float = 0.5  # of a read's verifications, kept for known peers whose records are about to expire
    newcomer_share: float = 0.25  # of a read's verifications, kept for newcomers even if all known peers have news
    burst: int = 256  # at the start, when all are newcomers: enough for a chain through any swarm
    fresh_s: float = 10.0  # for so long from the first look it is the start; later, newcomers in bulk are a flood ...
    settled_burst: int = 32  # ... of which so many are verified at once
    max_waiting: int = 1024  # passed on by peers; and newcomers of the directory


class OfferedRecord(NamedTuple):
    peer: PeerId  # under whose name it was offered
    data: bytes
    source: PeerId  # who offered it, or DIRECTORY

    @property
    def is_direct(self) -> bool:
        """Whether the peer told its own, on a link that proves who it is."""
        return self.source == self.peer


class RecordOffers:
    """`offer` and `replace_directory`, then `take` what to verify now, and report by `verified` what was."""

    def __init__(self, rng: random.Random, policy: RecordIntakePolicy = RecordIntakePolicy()) -> None:
        self._rng = rng
        self._policy = policy
        self._all = TokenBucket(policy.per_s, policy.burst)
        self._newcomers = TokenBucket(policy.newcomers_per_s, policy.burst)
        self._directory: list[OfferedRecord] = []
        self._fresh_until: float | None = None
        self._told: dict[tuple[PeerId, PeerId], OfferedRecord] = {}

    def __len__(self) -> int:
        return len(self._directory) + len(self._told)

    def offer(self, offered: OfferedRecord) -> None:
        """One that a peer passed on; a later one of the same peer from the same source replaces it."""
        key = (offered.peer, offered.source)
        if key in self._told or len(self._told) < self._policy.max_waiting:
            self._told[key] = offered

    def replace_directory(self, known: Sequence[OfferedRecord], newcomers: Sequence[OfferedRecord]) -> None:
        """What the latest read of the directory has; a random part of the newcomers, if there are too many."""
        limit = self._policy.max_waiting
        chosen = self._rng.sample(newcomers, limit) if len(newcomers) > limit else newcomers
        self._directory = [*known, *chosen]

    def take(self, now: float, rank: Callable[[PeerId], tuple[bool, int] | None]) -> list[OfferedRecord]:
        """What to look at now, best first. `rank` of a known peer: whether its record is about to expire, and its
        place, the least first; None of others."""
        if self._fresh_until is None:
            self._fresh_until = now + self._policy.fresh_s
        elif now > self._fresh_until:
            self._newcomers.burst = min(self._newcomers.burst, self._policy.settled_burst)
        offers = [*self._told.values(), *self._directory]
        self._told, self._directory = {}, []
        ranked: list[tuple[int, bool, int]] = []
        others: list[OfferedRecord] = []
        for number, offered in enumerate(offers):
            place = rank(offered.peer)
            if place is None:
                others.append(offered)
            else:
                ranked.append((place[1], not place[0], number))
        budget = max(0, int(self._all.available(now)))
        room = max(budget - len(ranked), int(budget * self._policy.newcomer_share))
        newcomers = min(room, max(0, int(self._newcomers.available(now))), len(others))
        ranked.sort()
        count = max(0, budget - newcomers)
        first = int(count * (1.0 - self._policy.urgent_share))
        rest = sorted(ranked[first:], key=lambda place: (place[1], place[0]))
        known = [offers[number] for _, _, number in (ranked[:first] + rest)[:count]]
        return known + self._mixed(others, newcomers)

    def verified(self, count: int, newcomers: int, now: float) -> None:
        """Of what `take` returned, so many records were verified, and of these so many of newcomers."""
        self._all.spend(count, now)
        self._newcomers.spend(newcomers, now)

    def _mixed(self, offers: Sequence[OfferedRecord], count: int) -> list[OfferedRecord]:
        """`count` of them: by the peers themselves, by others, and by the directory in turn, each in random order."""
        by_kind: tuple[list[OfferedRecord], ...] = ([], [], [])
        for offered in offers:
            by_kind[0 if offered.is_direct else 2 if offered.source == DIRECTORY else 1].append(offered)
        for kind in by_kind:
            self._rng.shuffle(kind)
        return list(itertools.islice(_in_turn(by_kind), count))


def _in_turn(kinds: Iterable[Sequence[OfferedRecord]]) -> Iterable[OfferedRecord]:
    for row in itertools.zip_longest(*kinds):
        yield from (offered for offered in row if offered is not None)
