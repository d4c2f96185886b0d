"""The numbers that tune audits: what each trades off, and its default (docs/benchmarks/audits.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AuditPolicy:
    rate: float = 1 / 100
    """Of the answers of hops that have passed an audit: more finds a late cheat sooner, and costs others work."""
    max_trials: int = 4
    """A hop's first answers for a client are audited until one has passed, but no more than these: a hop without a
    replica cannot pass."""
    min_answer: int = 8
    """Tokens of an answer that is worth an audit."""
    max_text: int = 1024
    """Tokens of prompt and answer that are replayed; the rest of a longer text is not audited."""
    rows: int = 24
    """Of which machines of unlike arithmetic are compared by their distance: more bytes, and fewer chance results."""
    sink_tokens: int = 4
    """The first tokens' rows are not drawn: attention sinks, whose norm is that of a few huge channels."""
    max_distance: float = 0.055
    """Relative distance of two honest machines' rows, as the median over the rows drawn. Honest kinds of machines stay
    below, and computing in fewer bits above."""
    max_margin: float = 0.25
    """Logits that one token's margin counts for at most, whatever it is: a single token condemns nobody."""
    margin_a_token: float = 0.005
    """Of the margins of an answer's tokens: honest machines' mean stays below, and another temperature's above ..."""
    margin_slack: float = 2.0
    """... and so many logits more, for chance."""
    timeout_s: float = 120.0
    """For a replay, which nobody waits for."""


POLICY = AuditPolicy()
