"""Which hop of which chain computed something else: compares what the hops of several chains report of one text.

Pure: reports come in as bytes, and how far two rows are apart is handed in. Three replicas are needed to say who is
wrong: two that disagree are a dispute, and no one is blamed. Nor is a hop whose contradictor had other inputs, bit by
bit: the rows that are compared by distance are a sample, and a hop before it may have spoiled the others.

Machines of the same arithmetic must agree bit for bit. Others may differ within the spread that honest machines were
measured to have, and differences within it are never held against anybody.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from swarm.audit_messages import DIGEST_BYTES, UNKNOWN, token_digests
from swarm.planner.auditing.policy import MEASURED_LAYERS, AuditPolicy, HonestSpread
from swarm.types import PeerId

Distance = Callable[[int, bytes, bytes], float]
"""After which layer, and two rows as they cross the wire there -> their relative distance."""


@dataclass(frozen=True, slots=True)
class HopReport:
    """`audit_messages.AuditReport` of one hop, with a body of the right length. `rows`: output rows by position;
    `margins`, of a replay's tail: by how much the logits after a position would have to be others for the audited
    text's next token to be the sample."""

    peer: PeerId
    start: int
    end: int
    first: int
    inputs: bytes
    outputs: bytes
    rows: Mapping[int, bytes] = field(default_factory=dict)
    arithmetic: str = ""
    margins: Mapping[int, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.first + len(self.inputs) // DIGEST_BYTES

    def digest(self, side: bytes, position: int) -> bytes:
        at = (position - self.first) * DIGEST_BYTES
        return side[at : at + DIGEST_BYTES] if at >= 0 else UNKNOWN


Reports = Sequence[HopReport]
"""Of all hops of a chain, in order."""


class Agreement(enum.Enum):
    EXACT = "exact"  # the same bits
    NEAR = "near"  # within the spread of honest machines of unlike arithmetic
    INEXACT = "inexact"  # within that spread, but their arithmetic is said to be the same
    FAR = "far"
    UNKNOWN = "unknown"  # nothing to compare


DEVIATIONS = (Agreement.INEXACT, Agreement.FAR)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of layers `[start, end)` between two chains whose inputs there agree. `position`: the first that differs.

    `distance`: median over the rows compared; of the tail, the mean margin of the tokens."""

    start: int
    end: int
    peers: tuple[PeerId, ...]
    other_peers: tuple[PeerId, ...]
    agreement: Agreement
    position: int = 0
    distance: float = 0.0


@dataclass(frozen=True, slots=True)
class Inconsistency:
    """The hops `peers` of one chain contradict each other, or the client where there is one, about one row."""

    peers: tuple[PeerId, ...]
    position: int


def inconsistency(reports: Reports, text: Sequence[int]) -> Inconsistency | None:
    """The first edge of a chain whose two ends do not report the same rows; the client's ends are the token ids of
    `text`. A hop that is alone in `peers` contradicts the client itself."""
    ids = b"".join(token_digests(text))
    client = HopReport("", 0, 0, 0, ids, ids)
    answer = HopReport("", 0, 0, 0, ids[DIGEST_BYTES:], b"")
    for before, after in zip((client, *reports), (*reports, answer), strict=True):
        at = _first_difference(before, before.outputs, after, after.inputs)
        if at is not None:
            return Inconsistency(tuple(report.peer for report in (before, after) if report.peer), at)
    return None


def compare(
    reports: Reports,
    others: Reports,
    num_layers: int,
    distance: Distance,
    policy: AuditPolicy,
    *,
    dtype: str,
    drafted: bool = False,
    first_layer: int = 0,
) -> list[Comparison]:
    """Edge by edge, as far as both chains have one there, up to and with the first that is far apart.

    `dtype`: of the weights; honest machines are farther apart in some formats than in others.
    `drafted`: one of the chains computed rows as drafts, so that even the same arithmetic need not give the same bits.
    `first_layer`: where both begin, if the client holds those before it.
    """
    found: list[Comparison] = []
    start = first_layer
    for end in sorted({r.end for r in reports} & {r.end for r in others}):
        ours, theirs = _within(reports, start, end), _within(others, start, end)
        same_arithmetic = len({r.arithmetic for r in (*ours, *theirs)}) == 1 and bool(ours[0].arithmetic)
        same_input = all(c.agreement is Agreement.EXACT for c in found)
        a, b = ours[-1], theirs[-1]
        named = all(r.arithmetic for r in (*_within(reports, 0, end), *_within(others, 0, end)))
        at = _first_difference(a, a.outputs, b, b.outputs)
        apart = 0.0
        if end == num_layers and (at is not None or (a.margins and b.margins)):
            agreement, apart = _token_agreement(a, b, policy, policy.spread(dtype, named=named), exact=at is None)
        elif at is None:
            known = any(
                a.digest(a.outputs, p) != UNKNOWN != b.digest(b.outputs, p) for p in range(min(a.tokens, b.tokens))
            )
            agreement = Agreement.EXACT if known else Agreement.UNKNOWN
        else:
            agreement, apart = _row_agreement(a, b, distance, policy, dtype, named)
        promised = same_arithmetic and same_input and not drafted
        if at is not None and promised and agreement in (Agreement.NEAR, Agreement.UNKNOWN):
            agreement = Agreement.INEXACT
        peers, other_peers = tuple(r.peer for r in ours), tuple(r.peer for r in theirs)
        found.append(Comparison(start, end, peers, other_peers, agreement, at or 0, apart))
        if agreement is Agreement.FAR:
            break
        start = end
    return found


def deviations(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Those to look into: the first that is far, then the first where bits should have agreed."""
    first = (next((c for c in comparisons if c.agreement is kind), None) for kind in (Agreement.FAR, Agreement.INEXACT))
    return [found for found in first if found is not None]


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A third chain (second in `comparisons`) against one of the two of a dispute. `same_inputs`: of the layers that
    are disputed, see `same_inputs`."""

    comparisons: Sequence[Comparison]
    same_inputs: bool


def blame(found: Comparison, with_ours: Contradiction, with_theirs: Contradiction) -> tuple[PeerId, ...]:
    """Who deviates, by a third chain, in the dispute `found`.

    () unless the third agrees with exactly one of the two, in the same layers and by the same measure, and contradicts
    the other one on the same inputs.
    """
    ours, theirs = (_at(part.comparisons, found.end) for part in (with_ours, with_theirs))
    if ours is None or theirs is None:
        return ()
    good = (Agreement.EXACT,) if found.agreement is Agreement.INEXACT else (Agreement.EXACT, Agreement.NEAR)
    if ours in DEVIATIONS and theirs in good and with_ours.same_inputs:
        return found.peers
    if theirs in DEVIATIONS and ours in good and with_theirs.same_inputs:
        return found.other_peers
    return ()


def same_inputs(reports: Reports, others: Reports, start: int) -> bool:
    """Whether in both chains a hop begins at layer `start`, and both got all the same rows, bit by bit."""
    a, b = (next((r for r in chain if r.start == start), None) for chain in (reports, others))
    if a is None or b is None or a.first or b.first:
        return False
    known = min(len(a.inputs), len(b.inputs))
    rows = range(0, known, DIGEST_BYTES)
    return a.inputs[:known] == b.inputs[:known] and all(a.inputs[at : at + DIGEST_BYTES] != UNKNOWN for at in rows)


def _at(comparisons: Sequence[Comparison], end: int) -> Agreement | None:
    return next((c.agreement for c in comparisons if c.end == end), None)


def _within(reports: Reports, start: int, end: int) -> list[HopReport]:
    return [report for report in reports if start <= report.start and report.end <= end]


def _first_difference(a: HopReport, side_a: bytes, b: HopReport, side_b: bytes) -> int | None:
    """The first position whose digest both know and that is not the same."""
    for position in range(max(a.first, b.first), max(a.first, b.first, min(a.tokens, b.tokens))):
        one, other = a.digest(side_a, position), b.digest(side_b, position)
        if one != other and UNKNOWN not in (one, other):
            return position
    return None


def _row_agreement(
    a: HopReport, b: HopReport, distance: Distance, policy: AuditPolicy, dtype: str, named: bool
) -> tuple[Agreement, float]:
    """By the rows drawn. Where none of them differs, or none are held, nothing is known."""
    shared = [p for p in a.rows if p in b.rows and a.digest(a.outputs, p) != b.digest(b.outputs, p)]
    if not shared:
        return Agreement.UNKNOWN, 0.0
    apart = median(distance(a.end, a.rows[p], b.rows[p]) for p in shared)
    spread = policy.spread(dtype, named=named and len(shared) >= policy.few_rows)
    return (Agreement.NEAR if apart <= too_far_apart(a.end, spread) else Agreement.FAR), apart


def _token_agreement(
    a: HopReport, b: HopReport, policy: AuditPolicy, spread: HonestSpread, *, exact: bool
) -> tuple[Agreement, float]:
    """By how far two tails are apart about the audited tokens: one that sampled them, and has no margins, is at 0.

    `exact`: their own samples are the same. Positions at which one of them did not sample do not count.
    """
    apart = [
        abs(min(policy.max_margin, a.margins.get(p, 0.0)) - min(policy.max_margin, b.margins.get(p, 0.0)))
        for p in sorted(a.margins.keys() | b.margins.keys())
        if a.digest(a.outputs, p) != UNKNOWN != b.digest(b.outputs, p)
    ]
    if not apart:
        return Agreement.UNKNOWN, 0.0
    total = math.fsum(apart)
    if total > too_far(len(apart), spread):
        return Agreement.FAR, total / len(apart)
    return (Agreement.EXACT if exact and not total else Agreement.NEAR), total / len(apart)


def too_far(tokens: int, spread: HonestSpread) -> float:
    """What the margins of so many tokens add up to at most, between honest machines: in logits."""
    return spread.margin_slack + spread.margin_a_token * tokens


def too_far_apart(end: int, spread: HonestSpread) -> float:
    """The median distance of rows after layer `end` that honest machines keep below."""
    return spread.distance * max(1.0, end / MEASURED_LAYERS)
