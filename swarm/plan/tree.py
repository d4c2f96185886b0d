"""Draft trees: tokens that may come next, as the engine sends, prunes and accepts them (PipeDec §3.3, SpecInfer).

Owns the structure of a tree and what follows from it: flat rows for a step, ancestor masks, cumulative log-probability,
growing level by level, pruning, the accepted path. Knows neither who drafted the tokens nor which tree slots of the
hops hold them: every operation that drops nodes says which it kept, so that the owner of the slots can follow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from swarm.errors import UsageError

ROOT = -1
"""The last committed token: the parent of a tree's first level, not itself a node."""

Candidate = tuple[int, int, float]
"""(parent node or ROOT, token, log-probability of the token after that parent)."""


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Nodes as rows of a `messages.Step`: token, parent slot (-1: the last committed token) and slot of each, `[n]`."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes with parents before children; `[n]` each. Trees are values: every change makes a new one.

    `parents[i]` is a node below i or ROOT; `logprobs[i]` is ln p(token i | its path), the drafter's belief, at most 0.
    Siblings have different tokens. Raises UsageError otherwise.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.parents) == len(self.logprobs):
            raise UsageError("a draft tree needs one token, one parent and one log-probability a node")
        if any(not ROOT <= parent < node for node, parent in enumerate(self.parents)):
            raise UsageError("a draft tree's parents come before their children")
        if len(set(zip(self.parents, self.tokens, strict=True))) < len(self.tokens):
            raise UsageError("a draft tree's siblings have different tokens")
        if not all(logprob <= 0 for logprob in self.logprobs):
            raise UsageError("a draft tree's log-probabilities are numbers of at most 0")

    @classmethod
    def of_paths(cls, paths: Iterable[Sequence[int]], logprobs: Iterable[Sequence[float]] | None = None) -> DraftTree:
        """Continuations of the root, merged where they begin alike; first come, first numbered.

        `logprobs`: as `paths`, one a token; without them every token counts as certain.
        """
        tokens: list[int] = []
        parents: list[int] = []
        beliefs: list[float] = []
        known: dict[tuple[int, int], int] = {}
        every = list(paths)
        for path, belief in zip(every, logprobs or [[0.0] * len(path) for path in every], strict=True):
            parent = ROOT
            for token, logprob in zip(path, belief, strict=True):
                node = known.setdefault((parent, token), len(tokens))
                if node == len(tokens):
                    tokens.append(token)
                    parents.append(parent)
                    beliefs.append(logprob)
                parent = node
        return cls(tuple(tokens), tuple(parents), tuple(beliefs))

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> tuple[int, ...]:
        """How far each node is from the root, `[n]`; 1 for the first level. Its position is the root's plus this."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each depth, from the first level down."""
        levels: list[list[int]] = []
        for node, depth in enumerate(self.depths()):
            if depth > len(levels):
                levels.append([])
            levels[depth - 1].append(node)
        return tuple(tuple(level) for level in levels)

    def cumulative(self) -> tuple[float, ...]:
        """ln p of each node's whole path, `[n]` (PipeDec's B = M · log P)."""
        sums: list[float] = []
        for parent, logprob in zip(self.parents, self.logprobs, strict=True):
            sums.append(logprob if parent == ROOT else sums[parent] + logprob)
        return tuple(sums)

    def masks(self, bits: Sequence[int] | None = None) -> tuple[int, ...]:
        """What each node attends to among the tree, `[n]`: its ancestors and itself, as bits of a whole number.

        Node j is bit j, or bit `bits[j]` if the nodes sit in slots.
        """
        places = bits if bits is not None else range(len(self))
        masks: list[int] = []
        for parent, place in zip(self.parents, places, strict=True):
            masks.append((0 if parent == ROOT else masks[parent]) | 1 << place)
        return tuple(masks)

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the first level down to `node`, itself included."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (or of ROOT) with this token."""
        for i, (parent, drafted) in enumerate(zip(self.parents, self.tokens, strict=True)):
            if parent == node and drafted == token:
                return i
        return None

    def flatten(self, slots: Sequence[int], nodes: Iterable[int] | None = None) -> TreeRows:
        """Rows for a step: all nodes, or those in `nodes` (a new level), in order. `slots[i]` is where node i lives."""
        chosen = sorted(nodes) if nodes is not None else range(len(self))
        return TreeRows(
            tuple(self.tokens[i] for i in chosen),
            tuple(ROOT if self.parents[i] == ROOT else slots[self.parents[i]] for i in chosen),
            tuple(slots[i] for i in chosen),
        )

    def grow(self, candidates: Iterable[Candidate], width: int) -> DraftTree:
        """With the `width` candidates of the most probable paths as new nodes (PipeDec §3.3.3); on ties the earlier.

        A candidate that is already a child of its parent is passed over. New nodes follow the old ones, those of one
        parent together, so a tree grown level by level stays in breadth-first order.
        """
        sums = self.cumulative()
        known = set(zip(self.parents, self.tokens, strict=True))
        fresh: dict[tuple[int, int], float] = {}
        for parent, token, logprob in candidates:
            if not ROOT <= parent < len(self):
                raise UsageError(f"a candidate's parent is node {parent} of a tree of {len(self)}")
            if (parent, token) not in known:
                fresh.setdefault((parent, token), logprob)
        ranked = sorted(fresh.items(), key=lambda item: -(item[1] + (0.0 if item[0][0] == ROOT else sums[item[0][0]])))
        chosen = sorted(ranked[: max(0, width)], key=lambda item: item[0][0])
        return DraftTree(
            self.tokens + tuple(token for (_, token), _ in chosen),
            self.parents + tuple(parent for (parent, _), _ in chosen),
            self.logprobs + tuple(logprob for _, logprob in chosen),
        )

    def best(self, count: int) -> tuple[int, ...]:
        """The `count` nodes of the most probable paths, in order; with a node come its ancestors."""
        sums = self.cumulative()
        return tuple(sorted(sorted(range(len(self)), key=lambda i: (-sums[i], i))[: max(0, count)]))

    def select(self, kept: Sequence[int], root: int = ROOT) -> DraftTree:
        """The tree of the nodes `kept`, rising, renumbered, below `root`. Each one's parent must be kept or `root`."""
        number = {node: i for i, node in enumerate(kept)}
        number[root] = ROOT
        try:
            parents = tuple(number[self.parents[node]] for node in kept)
        except KeyError:
            raise UsageError("a tree keeps a node only together with its parent") from None
        return DraftTree(tuple(self.tokens[i] for i in kept), parents, tuple(self.logprobs[i] for i in kept))

    def reroot(self, node: int) -> tuple[DraftTree, tuple[int, ...]]:
        """After `node` is committed: the tree below it, and the nodes of this tree it consists of."""
        inside = {node}
        for i, parent in enumerate(self.parents):
            if parent in inside:
                inside.add(i)
        kept = tuple(sorted(inside - {node}))
        return self.select(kept, node), kept

    def prune(self, dropped: Collection[int]) -> tuple[DraftTree, tuple[int, ...]]:
        """Without `dropped` and all that hangs on them, and the nodes of this tree that stay."""
        gone = set(dropped)
        for i, parent in enumerate(self.parents):
            if parent in gone:
                gone.add(i)
        kept = tuple(i for i in range(len(self)) if i not in gone)
        return self.select(kept), kept

    def accept(self, draw: Callable[[int], int]) -> tuple[tuple[int, ...], int]:
        """-> (the accepted nodes from the first level down, the token drawn after the last of them).

        `draw(node)` is the target's own token after `node` (or ROOT). The draft is only matched: the tokens settled are
        those the target draws, whatever was drafted.
        """
        node = ROOT
        accepted: list[int] = []
        while True:
            token = draw(node)
            child = self.child(node, token)
            if child is None:
                return tuple(accepted), token
            accepted.append(child)
            node = child
