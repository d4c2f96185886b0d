"""Rules of chains against brute force: the best of all chains that keep them, or the sentence that says which not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from test_plan_repair import cost_ms, every_simple_chain, random_snapshot, serving

from swarm.errors import NoRoute
from swarm.planner.routing.repair import repair
from swarm.planner.routing.route import RouteTable
from swarm.planner.routing.rules import APART, BLOCK, REGION, ChainRules
from swarm.planner.trust.evidence import PeerEvidence
from swarm.planner.trust.first_hop import DAY_S, FirstHopWishes, choose_first_hop
from swarm.planner.trust.trial import TrustedChain
from swarm.types import Hop, NodeProfile, Snapshot

NOW = 100 * DAY_S


def address(block: int) -> tuple[str, ...]:
    return (f"/ip4/11.{block}.0.1/tcp/4001/p2p/x",)


def with_marks(rng: random.Random, snapshot: Snapshot) -> Snapshot:
    """Regions, spelled in two ways, and blocks; some nodes tell neither."""
    nodes = [
        replace(node, region=rng.choice(["", "eu", "EU ", "us"]), addresses=address(rng.randrange(3)))
        if rng.random() < 0.8
        else node
        for node in snapshot.nodes
    ]
    return replace(snapshot, nodes=tuple(nodes))


def keeps(snapshot: Snapshot, rules: ChainRules, hops: tuple[Hop, ...]) -> bool:
    """What the rules mean, in plain words of hops."""
    nodes = {node.peer: node for node in snapshot.nodes}
    if rules.ends and not {hops[0].peer, hops[-1].peer} <= rules.ends:
        return False
    if not rules.ends and hops[0].peer in rules.not_first:
        return False
    for a, b in itertools.pairwise(hops):
        one, other = nodes[a.peer], nodes[b.peer]
        if a.peer in rules.ends and b.peer not in rules.ends and b.peer in rules.not_first:
            return False
        if rules.ends & {a.peer, b.peer}:
            continue
        if REGION in rules.apart and one.region.strip().lower() == other.region.strip().lower() != "":
            return False
        if BLOCK in rules.apart and one.addresses and one.addresses == other.addresses:
            return False
    return True


def random_rules(rng: random.Random, snapshot: Snapshot) -> ChainRules:
    def some(chance: float) -> frozenset[str]:
        return frozenset(node.peer for node in snapshot.nodes if rng.random() < chance)

    ends = some(0.6) if rng.random() < 0.5 else frozenset()
    return ChainRules(APART[rng.choice(list(APART))], ends, some(0.3) - ends)


def test_the_chain_is_the_best_of_those_that_keep_the_rules() -> None:
    rng, found_any, refused = random.Random(1), 0, 0
    for case in range(500):
        snapshot = with_marks(rng, random_snapshot(rng, 5, 5))
        rules = random_rules(rng, snapshot)
        chains = every_simple_chain(snapshot, [node.peer for node in snapshot.nodes], [])
        expected = min((cost_ms(snapshot, hops) for hops in chains if keeps(snapshot, rules, hops)), default=None)
        try:
            chain = RouteTable(snapshot, rules=rules).route()
        except NoRoute:
            assert expected is None, case
            refused += 1
            continue
        assert keeps(snapshot, rules, chain.hops), case
        assert chain.cost_ms == pytest.approx(expected), case
        found_any += 1
    assert min(found_any, refused) > 100


def test_a_repair_keeps_the_rules_and_rebuilds_the_fewest_layers() -> None:
    rng, repaired = random.Random(2), 0
    for case in range(500):
        snapshot = with_marks(rng, random_snapshot(rng, 5, 5))
        rules = random_rules(rng, snapshot)
        table = RouteTable(snapshot, rules=rules)
        try:
            chain = table.route()
        except NoRoute:
            continue
        lost = {rng.choice(chain.peers)}
        kept = [hop for hop in chain.hops if hop.peer not in lost]
        fresh = [node.peer for node in snapshot.nodes if node.peer not in lost]

        def rebuilt(hops: tuple[Hop, ...], kept: list[Hop] = kept) -> int:
            return sum(hop.end - hop.start for hop in hops if hop not in kept)

        chains = (hops for hops in every_simple_chain(snapshot, fresh, kept) if keeps(snapshot, rules, hops))
        expected = min(((rebuilt(hops), cost_ms(snapshot, hops)) for hops in chains), default=None)
        try:
            found = repair(table, chain, lost)
        except NoRoute:
            assert expected is None, case
            continue
        assert keeps(snapshot, rules, found.chain.hops), case
        assert expected is not None, case
        assert found.layers == expected[0], case
        assert found.chain.cost_ms == pytest.approx(expected[1]), case
        repaired += 1
    assert repaired > 60


def test_no_rules_change_nothing() -> None:
    rng = random.Random(3)
    for _ in range(50):
        snapshot = with_marks(rng, random_snapshot(rng))
        tables = RouteTable(snapshot), RouteTable(snapshot, rules=ChainRules())
        for one, other in zip(*(table.graphs.values() for table in tables), strict=True):
            assert (one.rho_ms == other.rho_ms).all()


def home(peer: str, start: int, end: int, block: int, region: str = "", ms: float = 1.0) -> NodeProfile:
    return serving(peer, start, end, ms, addresses=address(block), region=region)


HALVES = (home("a", 0, 4, 1, "eu"), home("b", 4, 8, 1, "eu"))


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (ChainRules(APART["block"]), "one address block, which --apart forbids.*--apart none"),
        (ChainRules(APART["region"]), "one region, which --apart forbids.*--apart none"),
        (ChainRules(APART["both"]), "relax"),
        (ChainRules(ends=frozenset({"a"})), "--trust.*go to nobody else"),
        (ChainRules(ends=frozenset({"gone"})), "--trust.*go to nobody else"),
        (ChainRules(APART["block"], frozenset({"gone"})), "--apart and --trust"),
    ],
)
def test_a_refusal_names_the_rule_that_is_in_the_way(rules: ChainRules, said: str) -> None:
    table = RouteTable(Snapshot("m", 8, HALVES), rules=rules)
    with pytest.raises(NoRoute, match=said):
        table.route(client_ms={})


def test_of_two_kinds_the_one_is_relaxed_that_is_in_the_way() -> None:
    nodes = (home("a", 0, 4, 1, "eu"), home("b", 4, 8, 2, "eu"))
    with pytest.raises(NoRoute, match=r"one region.*--apart block"):
        RouteTable(Snapshot("m", 8, nodes), rules=ChainRules(APART["both"])).route()
    with pytest.raises(NoRoute, match="no node serves layers 4:8"):  # no rule is to blame
        RouteTable(Snapshot("m", 8, HALVES[:1]), rules=ChainRules(APART["both"])).route()


def test_trusted_nodes_stand_beside_anybody() -> None:
    nodes = (home("a", 0, 2, 1), home("x", 2, 6, 1), home("b", 6, 8, 1))
    rules = ChainRules(APART["block"], frozenset({"a", "b"}))
    chain = RouteTable(Snapshot("m", 8, nodes), rules=rules).route()
    assert chain.peers == ("a", "x", "b")
    assert rules.first_stranger(chain) == "x"


def seen(days: float) -> PeerEvidence:
    return PeerEvidence(first_at=NOW - days * DAY_S, last_at=NOW, sessions=3, rows=1000.0)


def first(wishes: FirstHopWishes, evidence: Mapping[str, PeerEvidence], quicker: str = "", by: float = 1.2) -> str:
    """Of three replicas of the first half, of which `quicker` is that much quicker."""
    here: dict[str, object] = {"network_coordinate": (0.0,)}
    nodes = [serving(peer, 0, 4, 1.0 / by if peer == quicker else 1.0, **here) for peer in ("p", "q", "r")]
    snapshot = Snapshot("m", 8, (*nodes, serving("tail", 4, 8, 0.0, **here)))

    def solve(not_first: frozenset[str]) -> TrustedChain:
        return TrustedChain(RouteTable(snapshot, rules=ChainRules(not_first=not_first)).route(), None, "")

    return choose_first_hop(wishes, ChainRules(), snapshot.nodes, evidence, NOW, solve).chain.peers[0]


def test_peers_known_for_long_come_first_while_they_are_not_much_slower() -> None:
    evidence = {"p": PeerEvidence(first_at=1.0, last_at=NOW), "q": seen(30), "r": seen(2)}
    wish = FirstHopWishes(known=True)
    assert first(FirstHopWishes(), evidence) == "p"
    assert first(wish, evidence) == "q"  # p was met earlier and never served
    assert first(wish, evidence, quicker="r") == "q"
    assert first(wish, evidence, quicker="r", by=9.0) == "r"
    assert first(wish, {"r": seen(2)}) == "r"
    assert first(wish, {"r": seen(0.1)}) == "r"
    assert first(wish, {}) == "p"


def test_the_first_hop_changes_between_conversations_and_stays_within_one() -> None:
    assert first(FirstHopWishes(change="p"), {}) == "q"
    assert first(FirstHopWishes(change="q"), {}) == "p"
    assert first(FirstHopWishes(stay="r", change="p"), {}) == "r"
    assert first(FirstHopWishes(stay="gone", change="p"), {}) == "q"
    known = {"q": seen(30), "r": seen(30)}
    assert first(FirstHopWishes(known=True, change="q"), known) == "r"
    assert first(FirstHopWishes(known=True, change="q"), {"q": seen(30)}) == "q"  # to be known counts for more
    assert first(FirstHopWishes(change="p"), {}, quicker="p", by=9.0) == "p"
