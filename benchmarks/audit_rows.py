"""What audits compare, from recorded rows: distances and digests of rows, margins of sampled tokens. Numbers only.

Owns how a recording becomes numbers; `bench_audits` draws sessions from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from audit_machines import EDGES, MACHINES
from audit_recording import Rows, Text
from record_audit_rows import load

from swarm.types import Sampling
from swarm_kernels.audit.row_distance import OUTLIERS, row_distance
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.span import Span
from swarm_kernels.sampling.margin import token_margins
from swarm_kernels.sampling.sampler import RowContext, sample_rows

Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
INNER = EDGES[:-1]  # edges whose rows are compared; of the last one the tokens are
OPTIONS = (
    Sampling(temperature=0.8, top_p=0.95),
    Sampling(temperature=1.0),
)
SEEDS = (1, 2, 3)
REPLAY = "prefilled"
Sampled = npt.NDArray[np.int64]
"""`[drawn, answer]`: the tokens of each option and seed."""


def contexts(sampling: Sampling, prompt: int, count: int) -> list[RowContext]:
    return [RowContext(sampling, prompt + i) for i in range(count)]


def drawn(options: Sequence[Sampling]) -> list[Sampling]:
    return [replace(option, seed=seed) for option in options for seed in SEEDS]


@dataclass
class Recorded:
    """One machine's rows of one text in one way."""

    name: str
    rows: Rows
    tail: Span
    isa: str
    prompt: int
    _logits: torch.Tensor | None = None
    _sampled: dict[tuple[Sampling, ...], Sampled] = field(default_factory=dict)

    def logits(self) -> torch.Tensor:
        if self._logits is None:
            dispatch.select_isa(self.isa)
            self._logits = self.tail.logits(self.rows[EDGES[-1]]).float()
        return self._logits

    def forget(self) -> None:
        """The logits, which are large."""
        self._logits = None

    def sampled(self, options: Sequence[Sampling]) -> Sampled:
        key = tuple(options)
        if key not in self._sampled:
            logits = self.logits()
            self._sampled[key] = np.array([sample_rows(logits, contexts(o, self.prompt, len(logits))) for o in options])
        return self._sampled[key]

    def margins(self, claimed: Sampled, options: Sequence[Sampling]) -> Numbers:
        """`[drawn, answer]`: of tokens that another machine says it sampled."""
        own = self.sampled(options)
        found = np.zeros(own.shape)
        for i, option in enumerate(options):
            (wrong,) = np.nonzero(claimed[i] != own[i])
            rows = [RowContext(option, self.prompt + int(at)) for at in wrong]
            if rows:
                margins = token_margins(self.logits()[torch.from_numpy(wrong)], rows, claimed[i][wrong].tolist())
                found[i, wrong] = margins
        return found


def distances(a: Rows, b: Rows) -> dict[int, Numbers]:
    """Of each inner edge's rows: `row_distance`, of all of them at once."""
    return {edge: _distances(a[edge], b[edge]) for edge in INNER}


def _distances(ours: torch.Tensor, theirs: torch.Tensor) -> Numbers:
    a, b = (rows.float().numpy().astype(np.float64) for rows in (ours, theirs))
    size = np.maximum(np.abs(a), np.abs(b))
    kept = size <= np.quantile(size, 1 - OUTLIERS, axis=1, keepdims=True)
    apart, one, other = (np.linalg.norm(values * kept, axis=1) for values in (a - b, a, b))
    found: Numbers = apart / np.minimum(one, other)
    assert abs(found[0] - row_distance(ours[0].float().numpy(), theirs[0].float().numpy())) < 1e-9  # one definition
    return found


@dataclass(frozen=True)
class TextNumbers:
    """Of one text: `rows[a, b]` distances between two recordings, `margins[a, b] [drawn, answer]` those of the tokens
    of `a` by replay `b`, `differ[a, b] [answer]` whether any bit differs of a row, or a token."""

    rows: dict[tuple[str, str], dict[int, Numbers]] = field(default_factory=dict)
    margins: dict[tuple[str, str], Numbers] = field(default_factory=dict)
    differ: dict[tuple[str, str], Flags] = field(default_factory=dict)


@dataclass
class Folder:
    """A folder of `record_audit_rows`, one of its two sets."""

    path: Path
    part: str
    source: ModelSource
    texts_each: int
    dtype: str
    _tails: dict[str, Span] = field(default_factory=dict)

    @property
    def texts(self) -> list[Text]:
        return [
            (list(tokens), prompt) for tokens, prompt in load(self.path / f"texts-{self.part}.pt")[: self.texts_each]
        ]

    def tail(self, machine: str) -> Span:
        if machine not in self._tails:
            self._tails[machine] = MACHINES[machine].spans(self.source, self.dtype)[-1]
        return self._tails[machine]

    def has(self, machine: str, way: str) -> bool:
        return self._path(machine, way).exists()

    def _path(self, machine: str, way: str) -> Path:
        return self.path / f"{machine}-{way}-{self.part}.pt"

    def recorded(self, machine: str, way: str) -> list[Recorded]:
        found = load(self._path(machine, way))
        name = machine if way == REPLAY else f"{machine}, {way}"
        tail, isa = self.tail(machine), MACHINES[machine].isa
        return [Recorded(name, rows, tail, isa, prompt) for rows, (_, prompt) in zip(found, self.texts, strict=False)]

    def cheats(self, machine: str) -> dict[str, list[Recorded]]:
        found: Mapping[str, list[Rows]] = load(self.path / f"cheats-{self.part}.pt")
        tail, isa = self.tail(machine), MACHINES[machine].isa
        return {
            name: [Recorded(name, rows, tail, isa, p) for rows, (_, p) in zip(runs, self.texts, strict=False)]
            for name, runs in found.items()
        }


Claims = Callable[[Recorded], Sampled]
"""What a machine says it sampled."""


def numbers(
    audited: Sequence[Recorded], replays: Sequence[Recorded], options: Sequence[Sampling], claims: Claims
) -> TextNumbers:
    """Of one text: every audited recording against every replay, and the replays against each other."""
    found = TextNumbers()
    for one in audited:
        claimed = claims(one)
        for other in replays:
            pair = one.name, other.name
            found.rows[pair] = distances(one.rows, other.rows)
            found.margins[pair] = other.margins(claimed, options)
            changed = [(one.rows[edge] != other.rows[edge]).any(dim=1).numpy() for edge in INNER]
            tokens = (claimed != other.sampled(options)).any(axis=0)
            found.differ[pair] = np.logical_or.reduce([*changed, tokens])
    for i, one in enumerate(replays):
        for other in replays[: i + 1]:
            apart = distances(one.rows, other.rows)
            found.rows[one.name, other.name] = found.rows[other.name, one.name] = apart
    return found
