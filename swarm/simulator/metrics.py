"""Metrics of a run: throughput, latencies, finished and failed requests, utilization of nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swarm.simulator.model.node import SimNode
from swarm.simulator.model.session import SimPhase, SimSession

PERCENTILES = (50, 90, 95, 99, 100)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean and percentiles of some times, s."""

    mean: float
    percentiles: dict[int, float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Nearest-rank percentiles; all 0 without values."""
        ordered = sorted(values)
        if not ordered:
            return cls(0.0, dict.fromkeys(PERCENTILES, 0.0))
        ranks = {p: max(math.ceil(p / 100 * len(ordered)), 1) - 1 for p in PERCENTILES}
        return cls(math.fsum(ordered) / len(ordered), {p: ordered[i] for p, i in ranks.items()})

    def table(self) -> dict[str, float]:
        return {"mean": _rounded(self.mean), **{f"p{p}": _rounded(v) for p, v in self.percentiles.items()}}


def summary(
    sessions: Sequence[SimSession], nodes: Sequence[SimNode], end_ms: float, gaps: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """Requests only; the points of an outline belong to theirs. Times in s.

    `gaps`: when some layer had no node, ms. `covered` counts the requests outside all of them.
    """
    requested = [s for s in sessions if s.parent is None]
    done = [s for s in requested if s.phase is SimPhase.DONE and s.done_ms is not None]
    begin = min((s.request.at for s in requested), default=0.0)
    last = max((s.done_ms for s in done if s.done_ms is not None), default=begin)
    span_s = max(last - begin, 1e-9) / 1e3
    latency = [(s.done_ms - s.request.at) / 1e3 for s in done if s.done_ms is not None]
    first = [(s.first_ms - s.request.at) / 1e3 for s in done if s.first_ms is not None]
    tokens = sum(s.produced for s in done)
    per_token = [
        (s.done_ms - s.first_ms) / 1e3 / (s.produced - 1)
        for s in done
        if s.produced > 1 and s.first_ms is not None and s.done_ms is not None
    ]
    failures: dict[str, int] = {}
    for session in requested:
        if session.phase is not SimPhase.DONE:
            reason = session.failure or "not done in time"
            failures[reason] = failures.get(reason, 0) + 1
    return {
        "requests": len(requested),
        "finished": len(done),
        "finished_share": _rounded(len(done) / len(requested)) if requested else 1.0,
        "failures": dict(sorted(failures.items())),
        "span_s": _rounded(span_s),
        "throughput_rps": _rounded(len(done) / span_s),
        "tokens_per_s": _rounded(tokens / span_s),
        "latency_s": Percentiles.of(latency).table(),
        "first_token_s": Percentiles.of(first).table(),
        "per_token_s": Percentiles.of(per_token).table(),
        "covered": _covered(requested, gaps, end_ms),
        "uncovered_s": _rounded(math.fsum(b - a for a, b in gaps) / 1e3),
        "repairs": sum(s.repairs for s in requested),
        "repaired_requests": sum(1 for s in requested if s.repairs),
        "refused_dials": sum(s.dials for s in requested),
        "nodes": _nodes(nodes, end_ms),
    }


def outcomes(sessions: Sequence[SimSession], end_ms: float) -> dict[str, Any]:
    """Of the requests that have ended: how many with right tokens. Throughput: right answers' tokens over all time.

    A request still running at the end counts as neither, unless it is stuck: it has taken longer than all but 1% of the
    others did, in all and for each token.
    """
    done = [s for s in sessions if s.phase is SimPhase.DONE]
    right = [s for s in done if s.wrong_from is None]
    failed = [s for s in sessions if s.phase is SimPhase.FAILED]
    took = [(s.done_ms - s.request.at, max(1, s.produced)) for s in done if s.done_ms is not None]
    patience = _quantile([ms for ms, _ in took], 0.99)
    patience_a_token = _quantile([ms / tokens for ms, tokens in took], 0.99)
    running = [(end_ms - s.request.at, max(1, s.produced)) for s in sessions if s.live]
    stuck = sum(1 for ms, tokens in running if ms > patience and ms / tokens > patience_a_token)
    ended = len(done) + len(failed) + stuck
    return {
        "ended": ended,
        "right": len(right),
        "wrong": len(done) - len(right),
        "failed": len(failed),
        "stuck": stuck,
        "right_share": _rounded(len(right) / ended) if ended else 1.0,
        "right_tokens_per_s": _rounded(sum(s.produced for s in right) / max(end_ms, 1e-9) * 1e3),
    }


def _covered(requested: Sequence[SimSession], gaps: Sequence[tuple[float, float]], end_ms: float) -> dict[str, Any]:
    spans = [(s, s.done_ms if s.done_ms is not None else end_ms) for s in requested]
    safe = [s for s, end in spans if all(end <= a or b <= s.request.at for a, b in gaps)]
    done = sum(1 for s in safe if s.phase is SimPhase.DONE)
    return {"requests": len(safe), "finished": done, "share": _rounded(done / len(safe)) if safe else 1.0}


def _nodes(nodes: Sequence[SimNode], end_ms: float) -> dict[str, Any]:
    """Each node's utilization, as a share of the time it was alive, mean batch size and peak KV use."""
    shares: dict[str, Any] = {}
    for node in nodes:
        alive_ms = (node.died if node.died is not None else end_ms) - node.born
        usage = node.usage
        shares[node.id] = {
            "layers": str(node.span) if node.span else None,
            "busy": _rounded(usage.busy_ms / alive_ms) if alive_ms > 0 else 0.0,
            "rows_per_batch": _rounded(usage.rows / usage.batches) if usage.batches else 0.0,
            "kv_peak": _rounded(usage.most_kv / node.kv_room) if node.kv_room > 0 else 0.0,
        }
    return shares


def _quantile(values: Sequence[float], of: float) -> float:
    """Nearest rank; 0 without values."""
    return sorted(values)[math.ceil(of * len(values)) - 1] if values else 0.0


def _rounded(value: float) -> float:
    return round(value, 6)
