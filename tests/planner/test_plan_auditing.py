"""Verdicts on reports: what differs, what is only another arithmetic, and who is wrong."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from swarm.audit_messages import DIGEST_BYTES, UNKNOWN, digest, token_digests
from swarm.planner.auditing.policy import MEASURED_LAYERS, POLICY
from swarm.planner.auditing.verdict import (
    Agreement,
    Comparison,
    Contradiction,
    HopReport,
    blame,
    compare,
    deviations,
    inconsistency,
    same_inputs,
    too_far,
    too_far_apart,
)

TEXT = tuple(range(100, 140))
LAYERS = 6
EDGES = ((0, 2), (2, 4), (4, 6))
WIDE = POLICY.spread("bf16", named=False).distance
NARROW = POLICY.spread("bf16", named=True).distance


def rows_of(edge: int, machine: float) -> list[bytes]:
    """A row is a number as text; machines of unlike arithmetic differ in it."""
    return [f"{edge * 1000 + position + machine:.4f}".encode() for position in range(len(TEXT))]


def distance(_layer: int, a: bytes, b: bytes) -> float:
    return abs(float(a) - float(b))


def chain(
    name: str, machines: Sequence[float] = (0, 0, 0), tokens: Sequence[int] = TEXT[1:], arithmetic: str = ""
) -> list[HopReport]:
    """Three hops; `machines`: how far each one's output is from the truth."""
    digests = [b"".join(token_digests(TEXT))]
    found = []
    for (start, end), machine in zip(EDGES, machines, strict=True):
        rows = rows_of(end, machine)
        tail = [*token_digests(tokens), UNKNOWN]
        digests.append(b"".join(tail if end == LAYERS else map(digest, rows)))
        drawn = {} if end == LAYERS else {p: rows[p] for p in (5, 7, 11, 13)}
        found.append(HopReport(f"{name}{start}", start, end, 0, digests[-2], digests[-1], drawn, arithmetic))
    return found


def compared(a: list[HopReport], b: list[HopReport], *, drafted: bool = False) -> list[Comparison]:
    return compare(a, b, LAYERS, distance, POLICY, dtype="bf16", drafted=drafted)


def deviation(comparisons: Sequence[Comparison]) -> Comparison | None:
    return next(iter(deviations(comparisons)), None)


def blamed(
    found: Comparison, a: list[HopReport], b: list[HopReport], third: list[HopReport], *, exact: bool = True
) -> tuple[str, ...]:
    return blame(found, Contradiction(compared(a, third), exact), Contradiction(compared(b, third), exact))


def test_equal_bits_are_exact_at_every_edge() -> None:
    assert [c.agreement for c in compared(chain("a"), chain("b"))] == [Agreement.EXACT] * 3


@pytest.mark.parametrize("arithmetic", ["", "avx2"])
@pytest.mark.parametrize("hop", [0, 1])
def test_a_small_difference_is_held_against_those_alone_who_claim_the_same_arithmetic(
    hop: int, arithmetic: str
) -> None:
    machines = [0.0, 0.0, 0.0]
    machines[hop] = WIDE / 2
    comparisons = compared(chain("a", machines, arithmetic=arithmetic), chain("b", arithmetic=arithmetic))
    found = deviation(comparisons)
    if arithmetic:
        assert found is not None
        assert (found.agreement, found.start) == (Agreement.INEXACT, EDGES[hop][0])
    else:
        assert found is None
    assert deviation(compared(chain("a", machines), chain("b"), drafted=True)) is None


@pytest.mark.parametrize(("names", "far"), [(("avx2", "generic"), True), (("avx2", ""), False), (("", ""), False)])
@pytest.mark.parametrize("hop", [0, 1])
def test_two_that_compute_with_our_kernels_are_held_to_a_closer_distance(
    hop: int, names: tuple[str, str], far: bool
) -> None:
    """Unless one machine before the edge does not say what it is, or the rows drawn are few."""
    machines = [0.0, 0.0, 0.0]
    machines[hop] = (NARROW + WIDE) / 2
    a, b = chain("a", machines, arithmetic=names[0]), chain("b", arithmetic=names[1])
    assert deviation(compared(a, b)) is None, "few rows"
    drawn = range(5, 5 + POLICY.few_rows)
    a, b = (
        [
            replace(r, rows={p: rows_of(r.end, of[i])[p] for p in drawn}) if r.end < LAYERS else r
            for i, r in enumerate(c)
        ]
        for c, of in ((a, machines), (b, [0.0, 0.0, 0.0]))
    )
    found = deviation(compared(a, b))
    assert (found is not None and found.agreement is Agreement.FAR) == far
    if hop:
        unnamed = [replace(a[0], arithmetic=""), *a[1:]]
        assert deviation(compared(unnamed, b)) is None


def test_deep_models_and_fewer_bits_are_given_more_room() -> None:
    for named in (True, False):
        spreads = [POLICY.spread(dtype, named=named) for dtype in ("fp32", "bf16", "int8", "int4")]
        assert all(one.distance <= other.distance for one, other in itertools.pairwise(spreads))
        assert POLICY.spread("of tomorrow", named=named).distance == spreads[-1].distance
        deep = [too_far_apart(layers, spreads[1]) for layers in (1, MEASURED_LAYERS, 4 * MEASURED_LAYERS)]
        assert deep == [spreads[1].distance, spreads[1].distance, 4 * spreads[1].distance]
    for dtype in ("fp32", "bf16", "int8", "int4"):
        narrow, wide = (POLICY.spread(dtype, named=named) for named in (True, False))
        assert narrow.distance <= wide.distance
        assert too_far(200, narrow) <= too_far(200, wide)
        assert POLICY.max_margin < narrow.margin_slack, "a single token condemns nobody"


def test_after_an_edge_that_differs_a_little_the_same_arithmetic_promises_nothing() -> None:
    ours = chain("a", (0.01, 0.01, 0), arithmetic="avx2")
    other = [replace(chain("b")[0], arithmetic="gpu"), *chain("b", arithmetic="avx2")[1:]]
    assert [c.agreement for c in compared(ours, other)][:2] == [Agreement.NEAR, Agreement.NEAR]


@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize("liar", ["a", "b"])
def test_the_third_decides_between_two(hop: int, liar: str) -> None:
    lie = [0.0, 0.0, 0.0]
    lie[hop] = WIDE * 3
    a, b, c = (chain(name, lie if name == liar else (0.001, 0.001, 0)) for name in "abc")
    found = deviation(compared(a, b))
    assert found is not None
    assert found.agreement is Agreement.FAR
    assert blamed(found, a, b, c) == (f"{liar}{EDGES[hop][0]}",)
    assert blamed(found, a, b, c, exact=False) == ()  # a hop before it may have spoiled its inputs


def test_nobody_is_blamed_when_the_third_agrees_with_both_or_with_none() -> None:
    far = WIDE
    a, b = chain("a"), chain("b", (1.5 * far, 0, 0))
    found = deviation(compared(a, b))
    assert found is not None
    for third in (chain("c", (0.75 * far, 0, 0)), chain("c", (9 * far, 0, 0))):
        assert blamed(found, a, b, third) == ()
    assert blame(found, Contradiction([], True), Contradiction([], True)) == ()


def test_chains_with_other_borders_are_compared_where_they_meet() -> None:
    a, b = chain("a", (1, 0, 0)), chain("b")
    joined = [HopReport("wide", 0, 4, 0, b[0].inputs, b[1].outputs, b[1].rows), b[2]]
    found = deviation(compared(a, joined))
    assert found is None  # the first hop's lie is not seen at the edge where they meet, for its successor's rows agree
    assert compared(a, joined)[0].peers == ("a0", "a2")


def tails(tokens: Sequence[int], margins: Sequence[float], name: str = "b") -> list[HopReport]:
    """A replay whose tail samples `tokens` after the text's rows, and finds the text's own to miss by `margins`."""
    replayed = chain(name, tokens=tokens)
    return [*replayed[:2], replace(replayed[2], margins=dict(enumerate(margins)))]


SAMPLED = len(TEXT) - 1


@pytest.mark.parametrize(
    ("wrong", "margin", "far"),
    [(0, 0.0, False), (20, 0.02, False), (2, 9.0, False), (12, 9.0, True), (39, 0.1, True)],
)
def test_tokens_are_far_when_their_margins_are_larger_than_honest_ones(wrong: int, margin: float, far: bool) -> None:
    """Many tokens that only just were not sampled prove nothing; some that could not be do."""
    own = [token + 500 if i < wrong else token for i, token in enumerate(TEXT[1:])]
    last = compared(chain("a"), tails(own, [margin] * wrong + [0.0] * (SAMPLED - wrong)))[-1]
    assert (last.agreement is Agreement.FAR) == far
    assert last.distance == pytest.approx(wrong * min(margin, POLICY.max_margin) / SAMPLED)


def test_tokens_that_differ_without_margins_prove_nothing() -> None:
    assert (
        compared(chain("a"), chain("b", tokens=[token + 500 for token in TEXT[1:]]))[-1].agreement is Agreement.UNKNOWN
    )


def test_a_tail_that_did_not_sample_answers_for_nothing() -> None:
    """As in a session that was opened in the middle of an answer: others had sampled what came before."""
    half = SAMPLED // 2
    resumed = chain("a")
    digests = UNKNOWN * half + resumed[2].outputs[half * DIGEST_BYTES :]
    resumed[2] = replace(resumed[2], outputs=digests)
    other = tails([token + 500 for token in TEXT[1:]], [9.0] * half + [0.0] * (SAMPLED - half))
    assert compared(resumed, other)[-1].agreement is Agreement.NEAR


@pytest.mark.parametrize("liar", ["a", "b"])
def test_the_third_decides_about_tokens_too(liar: str) -> None:
    """An invented answer is disowned by both replays; a replay that calls an honest one invented, by the third."""
    invented, honest = [9.0] * SAMPLED, [0.0] * SAMPLED
    others = [token + 500 for token in TEXT[1:]]
    a = chain("a")
    b = tails(others, invented, "b")
    c = tails(others, [3.0] * SAMPLED, "c") if liar == "a" else tails(TEXT[1:], honest, "c")
    found = deviation(compared(a, b))
    assert found is not None
    assert blamed(found, a, b, c) == (f"{liar}4",)


@pytest.mark.parametrize("same_samples", [True, False])
def test_a_replay_that_understates_margins_is_found_by_another(same_samples: bool) -> None:
    others = [token + 500 for token in TEXT[1:]]
    b = tails(others, [9.0] * SAMPLED, "b")
    c = tails(others if same_samples else TEXT[1:], [0.0] * SAMPLED, "c")
    assert compared(b, c)[-1].agreement is Agreement.FAR


def test_rows_that_neither_draws_prove_nothing() -> None:
    a, b = (chain(name, (far, 0, 0)) for name, far in (("a", 1.0), ("b", 0.0)))
    a = [replace(report, rows={}) for report in a]
    assert compared(a, b)[0].agreement is Agreement.UNKNOWN
    assert deviation(compared(a, b)) is None


def test_a_prefix_that_was_cached_is_not_compared() -> None:
    a, b = chain("a", (1, 0, 0)), chain("b")
    first = 39
    cut = [
        replace(
            report,
            first=first,
            inputs=report.inputs[first * DIGEST_BYTES :],
            outputs=report.outputs[first * DIGEST_BYTES :],
            rows={},
        )
        for report in a
    ]
    assert compared(cut, b)[0].agreement is Agreement.UNKNOWN
    assert compared([replace(r, inputs=b"", outputs=b"", rows={}) for r in a], b)[0].agreement is Agreement.UNKNOWN


def test_the_two_ends_of_an_edge_must_report_the_same_rows() -> None:
    honest = chain("a")
    assert inconsistency(honest, TEXT) is None
    forged = [honest[0], replace(honest[1], inputs=honest[2].inputs), honest[2]]
    found = inconsistency(forged, TEXT)
    assert found is not None
    assert found.peers == ("a0", "a2")


def test_a_hop_beside_the_client_that_contradicts_it_stands_alone() -> None:
    honest = chain("a")
    other = b"".join(token_digests([1, *TEXT[1:]]))
    first = inconsistency([replace(honest[0], inputs=other), *honest[1:]], TEXT)
    assert first is not None
    assert (first.peers, first.position) == (("a0",), 0)
    last = inconsistency(chain("a", tokens=(*TEXT[1:20], 7, *TEXT[21:])), TEXT)
    assert last is not None
    assert (last.peers, last.position) == (("a4",), 19)


def test_inputs_are_the_same_only_if_all_of_them_are_known_and_equal() -> None:
    a, b = chain("a"), chain("b", (0, 0.001, 0))
    assert same_inputs(a, b, 0)
    assert same_inputs(a, b, 2)
    assert not same_inputs(a, b, 4)  # what the hop before it sent differs a little
    assert not same_inputs(a, b, 3)  # no hop begins there
    assert not same_inputs([replace(r, first=1) for r in a], b, 2)  # the first came from a prefix cache
    unknown = replace(a[1], inputs=UNKNOWN + a[1].inputs[DIGEST_BYTES:])
    assert not same_inputs([a[0], unknown, a[2]], [a[0], unknown, a[2]], 2)
    last = replace(a[1], inputs=a[1].inputs[:-1] + b"x")
    assert not same_inputs([a[0], last, a[2]], b, 2)


def test_hostile_reports_of_any_length_raise_nothing() -> None:
    rng = random.Random(1)
    for _ in range(300):
        reports = [
            HopReport(
                str(start),
                start,
                end,
                rng.choice([0, 3, 1 << 20]),
                rng.randbytes(DIGEST_BYTES * rng.randrange(4)),
                rng.randbytes(rng.randrange(70)),
                {rng.randrange(50): b"1.0"},
                margins={rng.randrange(60): rng.choice([0.0, 65.5, 1e4])},
            )
            for start, end in EDGES
        ]
        compared(reports, chain("b"))
        compared(chain("b"), reports)
        inconsistency(reports, TEXT)
        same_inputs(reports, chain("b"), 2)
