"""Rules that a chain can be asked to keep, so that those who compute it see less of a text (docs/privacy.md).

    apart      no two hops in a row of one operator, as far as records tell: an address block, a region
    ends       only these peers may be the first and the last hop, which read token ids
    not_first  these peers are not the first hop of a stranger

Each is about one hop or two in a row, so that the layer DAG keeps them by links and edges that do not exist: the chain
that is found is the best of those that keep all rules, and no other search is needed. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from swarm.address_blocks import claimed_block
from swarm.types import Chain, NodeProfile, PeerId

Floats = NDArray[np.float64]
BLOCK, REGION = "block", "region"
APART: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    BLOCK: frozenset({BLOCK}),
    REGION: frozenset({REGION}),
    "both": frozenset({BLOCK, REGION}),
}
"""What `--apart` may be, and by what it then tells operators."""


def mark(kind: str, node: NodeProfile) -> str:
    """What a node's record says of its operator, by BLOCK or REGION; "" where it does not tell."""
    return claimed_block(node.addresses) if kind == BLOCK else node.region.strip().casefold()


@dataclass(frozen=True, slots=True)
class ChainRules:
    """`apart`: of BLOCK and REGION. `ends`: () for anybody; these peers are nobody's strangers, and not kept apart."""

    apart: frozenset[str] = frozenset()
    ends: frozenset[PeerId] = frozenset()
    not_first: frozenset[PeerId] = frozenset()

    def allows(self, node: NodeProfile) -> bool:
        """Whether it may be a hop: one of `ends` that shares its experts hands rows to nodes that nobody named."""
        return node.peer not in self.ends or node.experts is None or len(node.experts.experts) == node.experts.count

    def links(self, nodes: Sequence[NodeProfile], rho_ms: Floats) -> Floats:
        """`rho_ms [N, N]` between `nodes`, infinite where the rules allow no link. Says nothing of unknown marks."""
        forbidden = np.zeros(rho_ms.shape, np.bool_)
        trusted = np.array([node.peer in self.ends for node in nodes], np.bool_)
        for kind in self.apart:
            marks = [mark(kind, node) for node in nodes]
            ranks = {mark: i for i, mark in enumerate(sorted(set(marks) - {""}))}
            of = np.array([ranks.get(mark, -1) for mark in marks], np.int64)
            of[trusted] = -1
            forbidden |= (of[:, None] == of) & (of >= 0)
        if self.ends and self.not_first:
            forbidden |= trusted[:, None] & np.array([node.peer in self.not_first for node in nodes], np.bool_)
        return np.where(forbidden, np.inf, rho_ms) if forbidden.any() else rho_ms

    def edges(self, peers: Sequence[PeerId], edge_ms: Floats) -> tuple[Floats, Floats]:
        """ρ from the client to each of `peers` as the first hop and back from it as the last, ms; infinite where it may
        be neither. `edge_ms [N]`: without the rules."""
        entry, leave = edge_ms.copy(), edge_ms.copy()
        if self.ends:
            strangers = np.array([peer not in self.ends for peer in peers], np.bool_)
            entry[strangers] = leave[strangers] = np.inf
        elif self.not_first:
            entry[np.array([peer in self.not_first for peer in peers], np.bool_)] = np.inf
        return entry, leave

    def first_stranger(self, chain: Chain) -> PeerId | None:
        """The first hop of a chain that is none of the trusted ones."""
        return next((peer for peer in chain.peers if peer not in self.ends), None)

    def keeps_first(self, left: Chain) -> bool:
        """Whether a chain that lacks hops still has its first stranger."""
        at = 0
        for hop in left.hops:
            if hop.start != at:
                return False
            if hop.peer not in self.ends:
                return True
            at = hop.end
        return False

    def may_be_kept(self, nodes: Iterable[NodeProfile], num_layers: int) -> bool:
        """Whether both ends of the model are among what the trusted of `nodes` hold, if only these may be the ends."""
        spans = [node.span for node in nodes if node.peer in self.ends and node.span is not None]
        both = any(span.start == 0 for span in spans) and any(span.end == num_layers for span in spans)
        return not self.ends or both

    def relaxed(self) -> Iterator[tuple[ChainRules, str]]:
        """These rules without one of them, or without all, and what to tell people if that one was in the way."""
        names = sorted(self.apart)
        for name in names:
            kept = [other for other in names if other != name]
            what = "address block" if name == BLOCK else "region"
            sentence = (
                f"every chain has two neighbouring parts of the model in one {what}, which --apart forbids; wait for"
                f" nodes elsewhere, or relax it: --apart {kept[0] if kept else 'none'}"
            )
            yield replace(self, apart=frozenset(kept)), sentence
        if self.ends:
            yield (
                replace(self, ends=frozenset()),
                "the trusted nodes (--trust) that answer do not hold the model's first and last layers, and token ids"
                " go to nobody else; start them, name others, or leave --trust out",
            )
        if len(names) + bool(self.ends) > 1:
            yield (
                replace(self, apart=frozenset(), ends=frozenset()),
                f"no chain keeps all of what {' and '.join(self._flags())} ask; relax one of them",
            )

    def _flags(self) -> list[str]:
        return ["--apart"] * bool(self.apart) + ["--trust"] * bool(self.ends)
