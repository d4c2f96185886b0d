"""The node records of one model that one reader holds: what the DHT says, what peers pass on, and what it has read
before, merged. The newest valid record of a peer wins, whoever handed it over; a goodbye is a record too, so that no
older record brings back a node that has left.

Owns these records, their bounds, and what is passed on of them. A record is verified once; unchanged ones cost
a comparison. Knows no clock, sockets or planner: times, keys and links are handed in.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from swarm import records
from swarm.gossip_messages import MAX_LISTED, MAX_RECORDS, MAX_SLICES, RECORD_KEY_BYTES
from swarm.net.gossip.model_depth import DepthClaim, ModelDepth, model_depth
from swarm.net.gossip.record_offers import DIRECTORY, OfferedRecord, RecordIntakePolicy, RecordOffers
from swarm.net.security.proof_of_work import proof_bits
from swarm.record_admission import RecordCandidate, admit
from swarm.records import WRONG_DEPTH, InvalidRecord, NodeRecord, Verify
from swarm.types import NodeProfile, PeerId, Snapshot

_TIMELY = frozenset({"late", "from_the_future"})  # what was wrong with them may be a clock's fault, or pass

_DIRECT, _FILE = "direct", "file"  # introducers: all peers that came by themselves, a file; else a peer or DIRECTORY


@dataclass(frozen=True, slots=True)
class RecordBookPolicy:
    """Bounds of one reader's memory, and what is passed on."""

    max_records: int = 4096  # 8 MB at most; a larger swarm is known in part
    slack: int = 512  # records over that before it is chosen which stay: the choice takes longer than a verification
    max_expired: int = 256  # of these, kept for their addresses and their age: the peers that lived longest
    sweep_s: float = 10.0  # between two looks for expired ones
    max_settled: int = 8192  # records remembered as not worth looking at again
    min_gain_s: float = 2.0  # a record newer by less is not passed on: traffic against freshness, when the DHT fails
    answer_bytes: int = 64 << 10
    newcomer_share: float = 0.25  # of an answer, random ones; the rest are those known longest
    stale_share: float = 0.5  # of a record's life, after which a newer one is urgent


class KnownRecord:
    """A verified record, since when its peer is known, and by whom: the `serial`th that `introducer` told us of.

    What there is too much of is shared by serial, so that who introduces many gains nothing over who introduces few.
    """

    __slots__ = ("data", "first_seen", "introducer", "key", "profile", "record", "serial")

    def __init__(
        self, record: NodeRecord, data: bytes, first_seen: float, introducer: str, serial: int, key: bytes
    ) -> None:
        self.record = record
        self.data = data
        self.profile = records.to_profile(record)
        self.first_seen = first_seen
        self.introducer = introducer
        self.serial = serial
        self.key = key

    @property
    def at_ms(self) -> int:
        return max(0, int(self.record.at * 1e3))


class RecordBook:
    """`offer...` records, `examine` those of `to_examine`; `snapshot` is what they say.

    `num_layers`: the model's depth; None: this reader does not open the model and takes it from the records
    (`model_depth`), those of the peers in `named` first. `own`: the peer id of a reader that is a node, whose own
    record is trusted as it is. `is_connected`: whether this reader holds a link to a peer that it chose itself.
    """

    def __init__(
        self,
        model: str,
        num_layers: int | None,
        verify: Verify,
        rng: random.Random,
        *,
        named: Collection[PeerId] = (),
        own: PeerId = "",
        is_connected: Callable[[PeerId], bool] = lambda peer: False,
        policy: RecordBookPolicy = RecordBookPolicy(),
        verification: RecordIntakePolicy = RecordIntakePolicy(),
    ) -> None:
        self.model = model
        self.own = own
        self._num_layers = num_layers
        self._named = frozenset(named)
        self._depth = ModelDepth() if num_layers is None else ModelDepth(num_layers, "model")
        self._verify = verify
        self._rng = rng
        self._is_connected = is_connected
        self._policy = policy
        self._salt = rng.randbytes(16)
        self._known: dict[PeerId, KnownRecord] = {}  # those known longest first
        self._offers = RecordOffers(rng, verification)
        self._settled: OrderedDict[int, str] = OrderedDict()  # hash of peer and record -> why it was rejected, "": old
        self._rejected: Counter[str] = Counter()  # of the directory's latest answer
        self._introduced: Counter[str] = Counter()
        self._swept_at = 0.0

    def __len__(self) -> int:
        """Records held, expired ones too."""
        return len(self._known)

    def record_of(self, peer: PeerId) -> NodeRecord | None:
        """The newest one, even if it has expired or says that the node has left."""
        known = self._known.get(peer)
        return known.record if known is not None else None

    def introducers(self) -> dict[PeerId, tuple[str, int]]:
        """By peer: who told of it first (the DIRECTORY, or a peer; those that came by themselves count as one, as do
        those from the file), and as its how-manieth."""
        return {peer: (known.introducer, known.serial) for peer, known in self._known.items()}

    def has_live(self, now: float) -> bool:
        """Whether any node but the reader itself is in a snapshot taken now."""
        return any(k.record.until > now and not k.record.left and p != self.own for p, k in self._known.items())

    # Reading ---------------------------------------------------------------------------------------------------------

    def offer_directory(self, found: Mapping[PeerId, bytes]) -> None:
        """All that one read of the directory found. What it lacks is not forgotten."""
        self._rejected.clear()
        known: list[OfferedRecord] = []
        newcomers: list[OfferedRecord] = []
        for peer, data in found.items():
            held = self._known.get(peer)
            if held is not None and held.data == data:
                continue
            reason = self._settled.get(hash((peer, data)))
            if reason is None:
                (newcomers if held is None else known).append(OfferedRecord(peer, data, DIRECTORY))
            elif reason:
                self._rejected[reason] += 1
        self._offers.replace_directory(known, newcomers)

    def offer(self, data: bytes, source: PeerId) -> None:
        """A record that the peer `source` passed on. Raises InvalidRecord if it is none, whatever it says."""
        peer, _ = records.claim(data)
        held = self._known.get(peer)
        if (held is None or held.data != data) and peer != self.own and hash((peer, data)) not in self._settled:
            self._offers.offer(OfferedRecord(peer, data, source))

    def keep_own(self, data: bytes, now: float) -> None:
        """The reader's own newest record. Raises InvalidRecord."""
        self._keep(records.decode(data, self.own, self.model, now, lambda *_: True), data, now, _DIRECT)

    def remember(self, data: bytes, first_seen: float, now: float) -> None:
        """A record that was kept in a file; it may have expired since. Raises InvalidRecord."""
        peer, at = records.claim(data)
        record = records.decode(data, peer, self.model, min(at, now), self._verify)
        self._check_depth(record)
        if peer != self.own and peer not in self._known:
            self._keep(record, data, min(first_seen, now), _FILE)

    def to_examine(self, now: float) -> list[OfferedRecord]:
        """Which of the records offered `examine` should look at now, best first."""
        if abs(now - self._swept_at) >= self._policy.sweep_s:
            self._shrink(now)

        def rank(peer: PeerId) -> tuple[bool, int] | None:
            known = self._known.get(peer)
            if known is None:
                return None
            record = known.record
            urgent = now > record.at + (record.until - record.at) * self._policy.stale_share
            return urgent, -1 if self._is_connected(peer) else known.serial

        return self._offers.take(now, rank)

    def examine(self, offered: Iterable[OfferedRecord], now: float) -> list[tuple[OfferedRecord, InvalidRecord]]:
        """Verify these and keep the good ones. -> those that are wrong, whatever the clocks."""
        wrong: list[tuple[OfferedRecord, InvalidRecord]] = []
        for one in offered:
            is_new = one.peer not in self._known
            try:
                if not self._is_newer(one):
                    self._settle(one, "")
                    continue
                self._offers.verified(1, int(is_new), now)
                record = records.decode(one.data, one.peer, self.model, now, self._verify)
                self._check_depth(record)
            except InvalidRecord as error:
                if one.source == DIRECTORY:
                    self._rejected[error.reason] += 1
                if error.reason not in _TIMELY:
                    wrong.append((one, error))
                if error.reason != "from_the_future":
                    self._settle(one, error.reason)
                continue
            self._keep(record, one.data, now, _DIRECT if one.is_direct else one.source)
        if len(self._known) > self._policy.max_records + self._policy.slack:
            self._shrink(now)
        return wrong

    def snapshot(self, now: float) -> Snapshot:
        """The nodes whose records are live and that have not left."""
        live = [k for _, k in sorted(self._known.items()) if k.record.until > now and not k.record.left]
        layers, rejected = self._decide_depth(live, now).layers, self._rejected
        agreed = tuple(known.profile for known in live if known.record.layers == layers)
        if len(agreed) < len(live):
            rejected = rejected + Counter({WRONG_DEPTH: len(live) - len(agreed)})
        return Snapshot(self.model, layers, agreed, now, dict(rejected))

    @property
    def depth(self) -> ModelDepth:
        """As of the latest snapshot, and who decided it."""
        return self._depth

    def _decide_depth(self, live: Collection[KnownRecord], now: float) -> ModelDepth:
        if self._num_layers is None:
            differ = len({known.record.layers for known in live}) > 1  # else nobody's proof matters
            claims = [
                DepthClaim(
                    known.record.layers, known.record.peer in self._named, differ and _proof_bits(known, now) > 0
                )
                for known in live
            ]
            self._depth = model_depth(claims, self._depth)
        return self._depth

    def _is_newer(self, offered: OfferedRecord) -> bool:
        """Whether it says that it is newer than what we hold. Raises InvalidRecord."""
        _, at = records.claim(offered.data)
        held = self._known.get(offered.peer)
        return held is None or at > held.record.at

    def _check_depth(self, record: NodeRecord) -> None:
        if self._num_layers not in (None, record.layers):
            raise InvalidRecord(WRONG_DEPTH, f"{record.peer} has {record.layers} layers, not {self._num_layers}")

    def _settle(self, offered: OfferedRecord, reason: str) -> None:
        self._settled[hash((offered.peer, offered.data))] = reason
        if len(self._settled) > self._policy.max_settled:
            self._settled.popitem(last=False)

    def _keep(self, record: NodeRecord, data: bytes, first_seen: float, introducer: str) -> None:
        held = self._known.get(record.peer)
        if held is None:
            serial = self._introduced[introducer]
            self._introduced[introducer] += 1
            key = hashlib.sha256(record.peer.encode()).digest()[:RECORD_KEY_BYTES]
            self._known[record.peer] = KnownRecord(record, data, first_seen, introducer, serial, key)
        elif record.at > held.record.at:
            known = KnownRecord(record, data, held.first_seen, held.introducer, held.serial, held.key)
            self._known[record.peer] = known

    def _shrink(self, now: float) -> None:
        """Down to the bounds: the live records that `record_admission` keeps, and few of those that have expired."""
        self._swept_at = now
        limit, kept = self._policy.max_records, {self.own, *(self._named & self._known.keys())}
        live: list[KnownRecord] = []
        expired: list[KnownRecord] = []
        for known in self._known.values():
            (live if known.record.until > now else expired).append(known)
        expired.sort(key=lambda known: known.first_seen - known.record.until)
        if len(live) > limit:
            chosen = admit(self._candidates(live, now), limit - len(kept), now, self._salt)
            kept.update(candidate.peer for candidate in chosen)
        else:
            kept.update(known.record.peer for known in live)
        kept.update(known.record.peer for known in expired[: min(self._policy.max_expired, max(0, limit - len(live)))])
        if len(kept) < len(self._known) + (self.own not in self._known):
            self._known = {peer: known for peer, known in self._known.items() if peer in kept}
            introducers = {known.introducer for known in self._known.values()}
            self._introduced = Counter({name: n for name, n in self._introduced.items() if name in introducers})

    def _candidates(self, live: Iterable[KnownRecord], now: float) -> list[RecordCandidate]:
        return [
            RecordCandidate(
                known.record.peer,
                known.first_seen,
                proof_bits=_proof_bits(known, now),
                is_connected=self._is_connected(known.record.peer),
            )
            for known in live
        ]

    # Passing on ------------------------------------------------------------------------------------------------------

    def listing(self, now: float) -> tuple[list[tuple[bytes, int]], int, int]:
        """-> what we hold, as (key, milliseconds of publication), at most MAX_LISTED; the slice that is listed in
        full, and of how many.

        All of a small swarm. Of a large one, the peers that we hold links to and those known longest, so that they stay
        fresh, and a random slice of the others.
        """
        held = [known for known in self._known.values() if known.record.until > now and known.record.peer != self.own]
        slices = 1
        while slices < MAX_SLICES and len(held) > slices * MAX_LISTED * (0.5 if slices > 1 else 1.0):
            slices *= 2
        if slices == 1:
            return [(known.key, known.at_ms) for known in held], 0, 1
        number = self._rng.randrange(slices)
        in_slice = [known for known in held if in_slice_of(known.key, number, slices)]
        held.sort(key=lambda known: -1 if self._is_connected(known.record.peer) else known.serial)
        first = held[: MAX_LISTED // 4]
        listed = {known.key: known.at_ms for known in (*first, *in_slice)}
        return list(listed.items())[:MAX_LISTED], number, slices

    def answer(self, listed: Mapping[bytes, int], number: int, slices: int, now: float) -> tuple[list[bytes], bool]:
        """-> records that a peer with this `listing` lacks, our own first; whether there are more."""
        gain_ms = self._policy.min_gain_s * 1e3
        news: list[KnownRecord] = []
        for peer, known in self._known.items():
            if known.record.until <= now:
                continue
            at_ms = listed.get(known.key)
            if peer == self.own:
                if at_ms is None or known.at_ms > at_ms:
                    news.insert(0, known)
            elif at_ms is None:
                if in_slice_of(known.key, number, slices):
                    news.append(known)
            elif known.at_ms > at_ms + (0.0 if known.record.left else gain_ms):
                news.append(known)
        if len(news) > MAX_RECORDS:
            news.sort(key=lambda known: -1 if known.record.peer == self.own else known.serial)
        chosen = news[:MAX_RECORDS]
        if len(news) > MAX_RECORDS:
            oldest = MAX_RECORDS - int(MAX_RECORDS * self._policy.newcomer_share)
            chosen[oldest:] = self._rng.sample(news[oldest:], MAX_RECORDS - oldest)
        sent: list[bytes] = []
        room = self._policy.answer_bytes
        for known in chosen:
            room -= len(known.data)
            if room < 0:
                break
            sent.append(known.data)
        return sent, len(sent) < len(news)

    def own_record(self, now: float) -> bytes:
        """b"" if there is none, or it has expired."""
        known = self._known.get(self.own)
        return known.data if known is not None and known.record.until > now else b""

    def to_ask(self, now: float, count: int, exclude: Collection[PeerId] = ()) -> list[NodeProfile]:
        """Peers to ask or to join by, in random order, live ones first; none that has left."""
        live: list[NodeProfile] = []
        expired: list[NodeProfile] = []
        for peer, known in self._known.items():
            if not known.record.left and peer not in exclude and peer != self.own and known.profile.addresses:
                (live if known.record.until > now else expired).append(known.profile)
        chosen = self._rng.sample(live, min(count, len(live)))
        return chosen + self._rng.sample(expired, min(count - len(chosen), len(expired)))

    def longest_known(self, limit: int) -> list[tuple[bytes, float]]:
        """(record, since when its peer is known), for a file."""
        kept = [k for k in self._known.values() if not k.record.left and k.record.peer != self.own]
        kept.sort(key=lambda known: (-known.record.until, known.first_seen))
        return [(known.data, known.first_seen) for known in kept[:limit]]


def _proof_bits(known: KnownRecord, now: float) -> int:
    return proof_bits(known.record.peer, known.record.proof, now) if known.record.proof else 0


def in_slice_of(key: bytes, number: int, slices: int) -> bool:
    return int.from_bytes(key) % slices == number
