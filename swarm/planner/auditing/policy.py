"""The numbers that tune audits: what each trades off, and its default (docs/benchmarks/audits.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class HonestSpread:
    """How far two honest machines of unlike arithmetic may be apart. More is held against one of them."""

    distance: float
    """Relative distance of two machines' rows, as the median over the rows drawn, after up to `MEASURED_LAYERS`."""
    margin_a_token: float
    """Of the margins of an answer's tokens, in logits: honest machines' mean stays below, and another temperature's
    above ..."""
    margin_slack: float
    """... and so many logits more, for chance."""


MEASURED_LAYERS = 20
"""Before the deepest edge whose rows were measured. Spreads grow with depth, at most in proportion to it."""

COMPILED = {
    "fp32": HonestSpread(0.001, 0.0005, 0.5),
    "bf16": HonestSpread(0.03, 0.004, 1.0),
    "int8": HonestSpread(0.12, 0.04, 4.0),
    "int4": HonestSpread(0.12, 0.04, 4.0),
}
"""Between our compiled kernels under unlike instruction sets, by the format of the weights."""

OTHERS = {
    "fp32": HonestSpread(0.055, 0.005, 2.0),
    "bf16": HonestSpread(0.055, 0.005, 2.0),
    "int8": HonestSpread(0.2, 0.08, 8.0),
    "int4": HonestSpread(0.2, 0.08, 8.0),
}
"""Where one of the two does not say what it computes with. In int8 and int4 plain torch and transformers' layers stay
below half of it; wide for the rest."""


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
    few_rows: int = 12
    """The median of fewer rows than that may be far off by chance: the wider spread of `others` counts."""
    max_margin: float = 0.25
    """Logits that one token's margin counts for at most, whatever it is: a single token condemns nobody."""
    compiled: Mapping[str, HonestSpread] = field(default_factory=lambda: MappingProxyType(COMPILED))
    others: Mapping[str, HonestSpread] = field(default_factory=lambda: MappingProxyType(OTHERS))
    timeout_s: float = 120.0
    """For a replay, which nobody waits for."""

    def spread(self, dtype: str, *, named: bool) -> HonestSpread:
        """`dtype`: of the weights. `named`: all machines concerned say that our compiled kernels are what computes."""
        known = self.compiled if named else self.others
        return known.get(dtype) or max(known.values(), key=lambda spread: spread.distance)


POLICY = AuditPolicy()
