"""The numbers that tune routing: what load is assumed to cost, and how long the exact searches go on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """What routes assume; shares are of τ, a node's time for a layer."""

    load_per_session: float = 0.25  # what a session in the batch adds for the others; more avoids busy nodes sooner
    tie_jitter: float = 0.1  # at most; per client, separates equal replicas. More sends clients on slower chains
    typical_answer_tokens: int = 256  # an answer's length when a cached prefix is weighed; limits are often far above


@dataclass(frozen=True, slots=True)
class PathSearchPolicy:
    """Work limits of the exact searches: more proves the best chain in more swarms, and takes longer in the rest.

    Counts and no times, so that every reader of a snapshot finds the same chain.
    """

    max_relaxations: int = 1 << 27  # of the dynamic program, in one search for a chain without a repeated node
    max_subproblems: int = 400  # of one such search
    max_subproblems_capped: int = 32  # of one with a limit on each hop, whose dynamic program costs more
    max_expansions: int = 4_000  # chain prefixes of one bottleneck search
    max_expansions_per_cap: int = 400  # ... and of each bottleneck tried in it
    max_bisections: int = 12  # bottlenecks tried before the rest is searched one by one


POLICY = RoutingPolicy()
SEARCH = PathSearchPolicy()
