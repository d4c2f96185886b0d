"""What is believed of peers, and which chains follow from it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from toy_swarm import node, snapshot

from swarm.address_blocks import claimed_block
from swarm.errors import NoRoute
from swarm.planner.routing.route import RouteTable
from swarm.planner.trust import evidence as of
from swarm.planner.trust.belief import (
    Strangers,
    audits_whole_answer,
    believe,
    believed_snapshot,
    shunned_s,
    strangers_of_late,
)
from swarm.planner.trust.evidence import UNKNOWN, FailureKind, PeerEvidence
from swarm.planner.trust.measurement import hop_times, overdue_hop
from swarm.planner.trust.policy import POLICY
from swarm.planner.trust.trial import Trial, choose_chain, repair_chain
from swarm.types import Chain, Snapshot

NOW = 1e6


def good(sessions: int = 3, rows: float = 100.0, ratio: float = 1.0, ms: float = 1.0) -> PeerEvidence:
    return PeerEvidence(first_at=NOW, last_at=NOW, sessions=sessions, rows=rows, ratio=ratio, quickest_ms=ms)


def bad(kind: FailureKind = FailureKind.STALLED, strikes: int = 1) -> PeerEvidence:
    found = of.met(UNKNOWN, NOW)
    for _ in range(strikes):
        found = of.failed(found, kind, NOW)
    return found


def two_by_three(**ms: float) -> Snapshot:
    """a, b, c serve 0:10 and d, e, f 10:20, each at 1 ms a layer or as given."""
    spans = dict.fromkeys("abc", (0, 10)) | dict.fromkeys("def", (10, 20))
    return snapshot(20, [node(peer, 10, span, ms=ms.get(peer, 1.0)) for peer, span in spans.items()])


def choice(seen: Snapshot, known: dict[str, PeerEvidence], chance: float = 1.0, pick: float = 0.0, running: int = 0):
    beliefs = believe(seen, known, NOW)
    table = RouteTable(believed_snapshot(seen, beliefs))
    trial = Trial(strangers_of_late(known, NOW), running, chance, pick)
    return choose_chain(table, beliefs, trial, client_ms={})


def test_without_evidence_everything_is_believed() -> None:
    seen = two_by_three(b=0.5, e=0.2)
    beliefs = believe(seen, {}, NOW)
    assert believed_snapshot(seen, beliefs) == seen
    assert choice(seen, {}).chain == RouteTable(seen).route(client_ms={})
    assert beliefs["b"].reason == "not proven; its 0.5 ms a layer are taken on its word"


def test_what_most_peers_have_in_common_changes_nothing() -> None:
    """Nodes that share one busy machine all take four times as long as they measured alone."""
    seen = two_by_three()
    known = {n.peer: good(ratio=4.0, ms=4.0) for n in seen.nodes}
    assert believed_snapshot(seen, believe(seen, known, NOW)) == seen
    assert strangers_of_late(known, NOW).bad == 0


def test_a_stranger_is_no_quicker_than_the_median_of_the_proven_and_a_liar_as_slow_as_measured() -> None:
    seen = two_by_three(b=0.01, c=0.5)
    known = {"a": good(), "d": good(), "e": good(ratio=50.0)}
    beliefs = believe(seen, known, NOW)
    assert beliefs["b"].layer_ms == 1.0
    assert "the median of those that are proven" in beliefs["b"].reason
    assert beliefs["e"].layer_ms == pytest.approx(50.0)
    assert "it claims 1 ms a layer and was measured at 50" in beliefs["e"].reason
    lower = replace(seen, nodes=tuple(replace(n, cost=node("x", 1, ms=0.001).cost) for n in seen.nodes))
    assert believe(lower, known, NOW)["d"].layer_ms >= POLICY.quickest_share  # whatever its record says by now


def test_disappointed_clients_take_no_strangers_word() -> None:
    seen = two_by_three(b=0.01, e=0.01)
    once = {"x": bad()}
    assert believe(seen, once, NOW)["b"].layer_ms == 0.01
    twice = {"x": bad(), "y": bad()}
    assert believe(seen, twice, NOW)["b"].layer_ms == 1.0
    assert believe(seen, twice, NOW + 2 * POLICY.memory_s)["b"].layer_ms == 0.01  # long ago


def test_a_quick_claim_wins_nothing_once_strangers_have_disappointed_though_quick_peers_are_proven() -> None:
    """Else whoever lies goes before every honest slow machine, wherever no proven one is left."""
    honest = dict.fromkeys("efghij", 10.0)
    spans = [node(peer, 10, (10, 20), ms=honest.get(peer, 0.1)) for peer in "defghij"]
    seen = snapshot(20, [node("a", 10, (0, 10)), *spans])
    trusted = believe(seen, {"a": good()}, NOW)
    assert (trusted["d"].layer_ms, trusted["e"].layer_ms) == (1.0, 10.0)
    wary = believe(seen, {"a": good(), "x": bad(), "y": bad()}, NOW)
    assert wary["d"].layer_ms == wary["e"].layer_ms == 10.0
    assert wary["a"].layer_ms == 1.0  # the proven are believed as before
    assert "most claims" in wary["d"].reason


def test_whole_answers_of_strangers_are_audited_and_samples_of_the_proven() -> None:
    assert audits_whole_answer(UNKNOWN)
    assert audits_whole_answer(bad())
    assert not audits_whole_answer(good())


def test_failures_are_remembered_longer_each_time_and_a_good_session_ends_it() -> None:
    times = [shunned_s(bad(FailureKind.SILENT, strikes)) for strikes in (1, 2, 3)]
    assert times == [POLICY.shun_s, 2 * POLICY.shun_s, 4 * POLICY.shun_s]
    assert shunned_s(bad(FailureKind.STALLED)) == POLICY.shun_stranger_s > 10 * POLICY.shun_s
    assert shunned_s(bad(strikes=1000)) == POLICY.max_shun_s
    assert shunned_s(of.finished(bad(), 10)) == 0.0
    assert shunned_s(of.audited(good(), False, NOW)) == POLICY.shun_cheat_s


def test_the_failed_are_used_when_nobody_else_is_left_and_cheats_never() -> None:
    seen = snapshot(20, [node("a", 10, (0, 10)), node("d", 10, (10, 20)), node("e", 10, (10, 20))])
    known = {"a": bad(), "d": of.audited(good(), False, NOW)}
    chosen = choice(seen, known)
    assert chosen.chain.peers == ("a", "e")
    with pytest.raises(NoRoute):
        choice(snapshot(20, [n for n in seen.nodes if n.peer != "e"]), known)


def test_proven_peers_do_the_work_and_one_stranger_at_a_time_is_tried() -> None:
    seen = two_by_three(b=0.1, c=0.1, e=0.1, f=0.1)
    known = {"a": good(), "d": good()}
    assert choice(seen, known).chain.peers == ("a", "d")  # nobody is tried
    tried = choice(seen, known, chance=0.0)
    assert tried.tried in set("bcef")
    assert len(set(tried.chain.peers) - {"a", "d"}) == 1
    assert tried.tried in tried.reason
    assert choice(seen, known, chance=0.0, running=POLICY.max_trials).tried is None


def test_promising_strangers_are_tried_at_once_until_they_disappoint() -> None:
    seen = two_by_three(**dict.fromkeys("acdef", 100.0), b=1.0)
    known = {"a": good(ms=100.0), "d": good(ms=100.0)}
    assert choice(seen, known, chance=0.99, pick=0.0).tried == "b"
    wary = known | {f"x{i}": bad() for i in range(6)}
    assert choice(seen, wary, chance=0.2, pick=0.0).tried is None
    assert choice(seen, wary, chance=0.5 * POLICY.exploration, pick=0.0).tried == "b"  # a trickle remains


def test_a_thousand_identities_of_one_block_get_the_share_of_one() -> None:
    many = [
        replace(node(f"s{i:03d}", 10, (0, 10)), addresses=(f"/ip4/45.66.{i % 250}.{i // 250}/tcp/1",))
        for i in range(300)
    ]
    others = [replace(node(f"o{i}", 10, (0, 10)), addresses=(f"/ip4/6{i}.1.1.1/tcp/1",)) for i in range(3)]
    seen = snapshot(20, [node("a", 10, (0, 10)), node("d", 10, (10, 20)), *many, *others])
    known = {"a": good(), "d": good()}
    rng = random.Random(1)
    drawn = Counter((choice(seen, known, 0.0, rng.random()).tried or "none")[0] for _ in range(60))
    assert drawn["s"] <= 30 < 60 == drawn.total()


def test_a_block_answers_for_its_members_and_a_lan_has_none() -> None:
    strangers = Strangers(10, 10, 1.0, {"45.66.0.0/16": (0, 8), "60.1.0.0/16": (5, 0)})
    assert strangers.p_fail("45.66.0.0/16") > 0.75 > 0.5 > strangers.p_fail("60.1.0.0/16")
    assert claimed_block(("/ip4/192.168.1.4/tcp/1", "/ip4/45.66.7.8/udp/1")) == "45.66.0.0/16"
    assert claimed_block(("/ip4/127.0.0.1/tcp/1", "/memory/x", "/ip4/999.1.1.1/tcp/1", "")) == ""
    assert claimed_block(("/ip6/2606:4700::1/tcp/1",)) == "2606:4700::/32"


def test_repairs_take_proven_nodes_first() -> None:
    seen = two_by_three(b=0.1)
    known = {"c": good(), "d": good()}
    beliefs = believe(seen, known, NOW)
    table = RouteTable(believed_snapshot(seen, beliefs))
    chain = choice(seen, known).chain
    left = Chain(tuple(hop for hop in chain.hops if hop.peer == "d"))
    assert repair_chain(table, left, beliefs, client_ms={}).chain.peers == ("c", "d")
    assert repair_chain(table, left, beliefs, client_ms={}, banned={"c"}).chain.peers[1] == "d"


def test_traces_never_count_for_more_than_the_round_trip() -> None:
    assert hop_times([900.0, 100.0], 100.0, 10.0, [True, False]) == (90.0, 10.0)
    assert hop_times([float("nan"), -5.0, float("inf")], 100.0, 10.0, [True] * 3) == (0.0, 0.0, 0.0)


def test_what_a_lying_trace_leaves_unexplained_is_charged_to_strangers() -> None:
    assert hop_times([5.0, 5.0], 1000.0, 20.0, [True, False]) == (5.0, 965.0)
    assert hop_times([5.0, 5.0], 1000.0, 20.0, [False, False]) == (485.0, 485.0)
    assert hop_times([5.0, 5.0], 100.0, 20.0, [True, False]) == (5.0, 5.0)  # a hiccup
    assert overdue_hop([5.0, 965.0], [5.0, 5.0]) == 1
    assert overdue_hop([5.0, 100.0], [5.0, 5.0]) is None  # twenty times as long, but nobody waits for it
    assert overdue_hop([900.0, 900.0], [500.0, 500.0]) is None


@pytest.mark.parametrize("seed", range(3))
def test_any_evidence_gives_usable_beliefs(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        known = {}
        for peer in "abcdefgh":
            found = of.met(UNKNOWN, rng.choice([0.0, NOW, 1e12]))
            for _ in range(rng.randrange(6)):
                found = rng.choice(
                    [
                        of.failed(found, rng.choice(list(FailureKind)), rng.choice([0.0, NOW, 1e12])),
                        of.finished(found, rng.choice([0.0, 1.0, 1e12])),
                        of.measured(found, rng.choice([0.0, 1e-9, 1.0]), rng.choice([0.0, 1.0, 1e12])),
                        of.audited(found, rng.random() < 0.7, NOW),
                    ]
                )
            known[peer] = found
        seen = two_by_three(a=rng.choice([0.0, 1.0, 1e6]))
        for belief in believe(seen, known, NOW).values():
            assert 0.0 <= belief.p_fail <= 1.0
            assert 0.0 <= belief.layer_ms < float("inf")
            assert belief.reason
        try:
            chosen = choice(seen, known, rng.random(), rng.random())
        except NoRoute:
            continue
        assert chosen.chain.hops[0].start == 0
