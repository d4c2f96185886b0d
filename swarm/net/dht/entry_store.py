"""The entries that one DHT node holds, all of them checked, and which stay when there are too many.

Owns the bounds: entries under a key, keys of a peer, entries and keys in all. Which entries stay is
`swarm.record_admission`'s choice by what this node has seen of each peer; which keys stay is a matter of who was first
known to publish there. Knows no network and no signatures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from swarm.address_blocks import UNKNOWN_BLOCK
from swarm.net.dht.entries import MAX_REPLY, Entry, pack
from swarm.net.dht.peer_history import PeerHistory
from swarm.net.dht.policy import EntryStorePolicy
from swarm.record_admission import RecordCandidate, admit
from swarm.types import PeerId


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """What a store asks about a peer."""

    block_of: Callable[[PeerId], str] = lambda peer: UNKNOWN_BLOCK
    proof_bits: Callable[[Entry], int] = lambda entry: 0


@dataclass(slots=True)
class _Held:
    entry: Entry
    packed: bytes
    proof_bits: int


@dataclass(slots=True)
class _Shelf:
    """The entries under one key, in the order in which they are sent; those that came since the last sorting follow."""

    held: dict[PeerId, _Held] = field(default_factory=dict)
    sorted_at: float = float("-inf")
    reply: tuple[bytes, float] | None = None  # as of the last sorting


class EntryStore:
    """`clock`: seconds since the epoch, as entries expire by it. `salt`: this node's own, see `admit`."""

    def __init__(
        self,
        clock: Callable[[], float],
        salt: bytes = b"",
        policy: EntryStorePolicy = EntryStorePolicy(),
        history: PeerHistory | None = None,
        facts: PeerFacts = PeerFacts(),
    ) -> None:
        self._clock = clock
        self._salt = salt
        self._policy = policy
        self._history = history if history is not None else PeerHistory()
        self._facts = facts
        self._shelves: dict[bytes, _Shelf] = {}
        self._keys_of: Counter[PeerId] = Counter()
        self._pinned: set[bytes] = set()
        self._swept_at = clock()

    def __len__(self) -> int:
        """Entries, of which some may have expired."""
        return sum(len(shelf.held) for shelf in self._shelves.values())

    def pin(self, key: bytes) -> None:
        """This node itself uses the key: it stays whatever others store."""
        self._pinned.add(key)

    def expires_at(self, key: bytes, peer: PeerId) -> float:
        """Of the entry that we hold of `peer`; 0 if there is none."""
        shelf = self._shelves.get(key)
        held = shelf.held.get(peer) if shelf is not None else None
        return held.entry.expires_at if held is not None else 0.0

    def put(self, key: bytes, entry: Entry) -> bool:
        """Whether we hold it now; only a later entry replaces another. The caller has checked its signature."""
        now = self._clock()
        if now - self._swept_at > self._policy.sweep_s:
            self._sweep(now)
        if entry.expires_at <= max(now, self.expires_at(key, entry.peer)):
            return False
        shelf = self._shelves.get(key) or _Shelf()
        known = shelf.held.get(entry.peer)
        if known is None:
            if self._keys_of[entry.peer] >= self._policy.max_keys_of_peer and key not in self._pinned:
                return False
            self._keys_of[entry.peer] += 1
        self._shelves[key] = shelf
        self._history.saw(entry.peer, now)
        shelf.held[entry.peer] = _Held(entry, pack(entry), self._facts.proof_bits(entry))
        if len(shelf.held) > self._policy.max_entries * self._policy.slack:
            self._sort(shelf, now)
        if len(self._shelves) > self._policy.max_keys or len(self) > self._policy.max_total_entries:
            self._drop_keys(now)
        return self.expires_at(key, entry.peer) == entry.expires_at

    def entries(self, key: bytes) -> list[Entry]:
        """Those that have not expired."""
        now = self._clock()
        shelf = self._shelves.get(key) or _Shelf()
        return [held.entry for held in shelf.held.values() if held.entry.expires_at > now]

    def reply(self, key: bytes, most: int = MAX_REPLY) -> tuple[bytes, float] | None:
        """The entries that others get, packed into at most so many bytes, and when the last of them expires."""
        now = self._clock()
        shelf = self._shelves.get(key)
        if shelf is None:
            return None
        if len(shelf.held) >= self._policy.ordered_from:
            if now - shelf.sorted_at <= self._policy.reorder_s and shelf.reply and len(shelf.reply[0]) <= most:
                return shelf.reply
            self._sort(shelf, now)
        packed: list[bytes] = []
        latest, size = 0.0, 0
        for held in shelf.held.values():
            if held.entry.expires_at > now:
                size += len(held.packed)
                if size > most:
                    break
                packed.append(held.packed)
                latest = max(latest, held.entry.expires_at)
        reply = (b"".join(packed), latest) if packed else None
        shelf.reply = reply if most == MAX_REPLY else None
        return reply

    def _sort(self, shelf: _Shelf, now: float) -> None:
        """Keep at most as many as may stay, the most worth keeping first."""
        candidates = [
            RecordCandidate(
                peer,
                self._history.first_seen(peer, now),
                held.proof_bits,
                self._facts.block_of(peer),
            )
            for peer, held in shelf.held.items()
            if held.entry.expires_at > now
        ]
        chosen = [candidate.peer for candidate in admit(candidates, self._policy.max_entries, now, self._salt)]
        held = {peer: shelf.held[peer] for peer in chosen}
        self._forget(peer for peer in shelf.held if peer not in held)
        shelf.held, shelf.sorted_at, shelf.reply = held, now, None

    def _sweep(self, now: float) -> None:
        self._swept_at = now
        for key, shelf in list(self._shelves.items()):
            late = [peer for peer, held in shelf.held.items() if held.entry.expires_at <= now]
            for peer in late:
                del shelf.held[peer]
            self._forget(late)
            if not shelf.held:
                del self._shelves[key]

    def _drop_keys(self, now: float) -> None:
        """Drop keys until there is room again: first those where everybody is a newcomer, never our own."""
        policy = self._policy
        self._sweep(now)
        founded = {
            key: min(self._history.first_seen(peer, now) for peer in shelf.held)
            for key, shelf in self._shelves.items()
            if key not in self._pinned
        }
        total = len(self)
        for key in sorted(founded, key=lambda key: -founded[key]):
            room = len(self._shelves) * policy.slack <= policy.max_keys
            if room and total * policy.slack <= policy.max_total_entries:
                break
            shelf = self._shelves.pop(key)
            total -= len(shelf.held)
            self._forget(shelf.held)

    def _forget(self, peers: Iterable[PeerId]) -> None:
        for peer in peers:
            self._keys_of[peer] -= 1
            if self._keys_of[peer] <= 0:
                del self._keys_of[peer]
