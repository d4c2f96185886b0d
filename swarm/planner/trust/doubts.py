"""Which nodes' records another node does not build on, from what it has seen of them itself: who answers, since when.

Owns the rule. A record alone is only a claim: it may name a peer that does not exist. So a node that was pinged often
and never answered counts as absent, and one that is new is no reason to move away. Who was seen to answer is believed
at once where it helps and after a while where it could harm, so that small swarms form as fast as ever; and as a node
that answers nobody is silent to everybody, the views of honest nodes agree in the end. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from swarm.types import NodeProfile, PeerId, Snapshot, coverage


@dataclass(frozen=True, slots=True)
class DoubtPolicy:
    """More patience keeps more honest nodes that are hard to reach; less drops invented ones sooner."""

    grace_s: float = 30.0  # from the first sight of a node until others may move on its account
    silent_pings: int = 4  # in a row without an answer, the first ones, after which a node counts as absent
    few_strangers: int = 8  # while more have never answered, nobody moves on their account however old they are
    max_strangers: int = 64  # that are counted, the longest known first: bounds what thousands of records cost


@dataclass(frozen=True, slots=True)
class Acquaintance:
    """What one node knows of another. Times in seconds by its own clock."""

    first_seen: float
    answered: bool = False  # ever
    missed: int = 0  # pings without an answer since the last one
    condemned: bool = False  # an audit failed, by evidence that was checked


@dataclass(frozen=True, slots=True)
class Doubts:
    """`silent`: count as absent. `new`: count, but nobody moves away on their account. `crowd`: strangers beyond those
    that count; looked at only for layers that nobody else holds."""

    new: Collection[PeerId] = field(default=frozenset())
    silent: Collection[PeerId] = field(default=frozenset())
    crowd: Collection[PeerId] = field(default=frozenset())

    def believed(self, snapshot: Snapshot) -> Snapshot:
        if not self.silent and not self.crowd:
            return snapshot
        nodes = [n for n in snapshot.nodes if n.peer not in self.silent and n.peer not in self.crowd]
        lacking = set(missing_layers(nodes, snapshot.num_layers)) if self.crowd else set()
        for node in snapshot.nodes:
            if not lacking:
                break
            if (
                node.peer in self.crowd
                and node.peer not in self.silent
                and node.span
                and lacking.intersection(node.span)
            ):
                nodes.append(node)
                lacking.difference_update(node.span)
        return replace(snapshot, nodes=tuple(sorted(nodes, key=lambda node: node.peer)))

    def firm(self, snapshot: Snapshot) -> Snapshot:
        """Only the nodes that are worth a move."""
        doubted = {*self.new, *self.silent, *self.crowd}
        return replace(snapshot, nodes=tuple(n for n in snapshot.nodes if n.peer not in doubted))


NONE = Doubts()


def doubts(
    me: PeerId, acquaintances: Mapping[PeerId, Acquaintance], now: float, policy: DoubtPolicy = DoubtPolicy()
) -> Doubts:
    """If nobody has ever answered, it is we who cannot reach the others, and silence tells nothing."""
    reached = any(one.answered for one in acquaintances.values())
    silent = {
        peer
        for peer, one in acquaintances.items()
        if one.condemned or (reached and not one.answered and one.missed >= policy.silent_pings)
    }
    new = {p for p, one in acquaintances.items() if now - one.first_seen < policy.grace_s and p not in silent}
    unmet = [
        (one.first_seen, p) for p, one in acquaintances.items() if not one.answered and p not in silent and p != me
    ]
    strangers = [peer for _, peer in sorted(unmet)] if reached else []
    if len(strangers) > policy.few_strangers:
        new.update(strangers)
    crowd = frozenset(strangers[policy.max_strangers :])
    return Doubts(frozenset(new - {me} - crowd), frozenset(silent - {me}), crowd)


def missing_layers(nodes: Iterable[NodeProfile], num_layers: int) -> list[int]:
    held = coverage((node.span for node in nodes if node.span), num_layers)
    return [layer for layer, count in enumerate(held) if not count]
