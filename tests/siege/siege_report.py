"""The bounds that a siege must keep, and a table of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NODES = 5
COLUMNS = (
    *("attack", "tokens/s quiet", "attacked", "ratio", "5 to 95%", "answers", "failed", "wrong"),
    *("MiB", "descriptors", "back after", "seen", "fresh", "misses"),
)
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


@dataclass(frozen=True)
class Bounds:
    ratio: float = 0.8  # of the quiet tokens/s
    memory_mib: float = 64.0
    descriptors: int = 64
    back_after_s: float = 5.0
    fresh_client_s: float = 3.0

    def missed(self, result: Any) -> list[str]:
        """The names of what `result` (a Siege) misses."""
        return [
            name
            for name, kept in (
                ("tokens/s", result.ratio >= self.ratio),
                ("failed", not result.failed and result.nodes_alive),
                ("wrong", not result.wrong),
                ("memory", result.memory_mib <= self.memory_mib),
                ("descriptors", result.descriptors <= self.descriptors),
                ("recovery", result.back_after_s is not None and result.back_after_s <= self.back_after_s),
                ("map", result.least_seen in (None, NODES)),
                ("fresh client", result.fresh_client_s is None or result.fresh_client_s <= self.fresh_client_s),
            )
            if not kept
        ]


BOUNDS = Bounds()


def report(results: Sequence[Any], head: bool) -> str:
    """Rows of a Markdown table, one a Siege."""
    lines = [HEAD] if head else []
    for r in results:
        back = "never" if r.back_after_s is None else f"{r.back_after_s:.1f} s"
        seen = "" if r.least_seen is None else f"{r.least_seen}/{NODES}"
        fresh = "" if r.fresh_client_s is None else f"{r.fresh_client_s:.1f} s"
        missed = ", ".join(BOUNDS.missed(r)) or "none"
        speeds = (
            f"{r.quiet_tokens_s:.1f}",
            f"{r.tokens_s:.1f}",
            f"{r.ratio:.0%}",
            f"{r.ratio_low:.0%} to {r.ratio_high:.0%}",
        )
        answers = (str(r.answers), str(r.failed), str(r.wrong))
        grown = (f"{r.memory_mib:+.0f}", f"{r.descriptors:+d}")
        lines.append(f"| {' | '.join((r.attack, *speeds, *answers, *grown, back, seen, fresh, missed))} |")
    return "\n".join(lines)
