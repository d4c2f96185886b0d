"""Audits on recorded rows of SmolLM2: which cheats are found after how many tokens, and who is accused by mistake.

    nice python benchmarks/bench_audits.py [--texts 4] [--sessions 100000]

Honest machines of unlike arithmetic and cheats in the middle one of three hops, or in the sampling, are recorded once;
sessions are then drawn from the rows. The threshold's margin is reported on one set of questions, and the rates on
another one. The verdict is that of `swarm.planner.auditing`. Costs in time are of one prefill and of decoding the same
text on one machine, in turn.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from audit_prompts import CALIBRATION, REPORTING
from audit_recording import (
    EDGES,
    SAMPLING,
    DitheredSource,
    Recording,
    SkippingSpan,
    Text,
    decode_time,
    prefill_time,
    record,
    record_drafted,
    sampled,
    spans,
    write_texts,
)
from kernel_timing import table

from swarm.planner.auditing.policy import POLICY
from swarm.planner.auditing.verdict import chance_of
from swarm.row_digest import row_digests
from swarm_kernels.audit.row_distance import row_distance
from swarm_kernels.models.open import open_model
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.cpu import cpu_library
from swarm_kernels.runtime.hidden_codec import to_wire
from swarm_kernels.runtime.span import Span
from swarm_kernels.tokenizer.tokenizer import load_tokenizer

TOKENS = (1, 2, 4, 8, 12, 24, 50, 100, 200)
MACHINES = {
    "AVX2": ("best", False),
    "portable": ("generic", False),
    "torch": ("reference", False),
    "transformers": ("best", True),
}
"""Instruction set, and whether transformers' layers run."""

Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Runs = dict[str, list[Recording]]
"""What runs -> its recording of each text."""


def honest(source: ModelSource, texts: Sequence[Text]) -> Runs:
    """Every kind of machine, and AVX2 with the answer computed as drafts."""
    runs: Runs = {}
    for name, (isa, transformers) in MACHINES.items():
        hops = spans(source, "bf16", isa=isa, transformers=transformers)
        runs[name] = [record(hops, *text) for text in texts]
        if name == "AVX2":
            runs["AVX2, drafted"] = [record_drafted(hops, *text) for text in texts]
    dispatch.select_isa("best")
    return runs


def cheats(source: ModelSource, texts: Sequence[Text]) -> Runs:
    """All on AVX2."""
    first, middle, last = hops = spans(source, "bf16")
    generator = torch.Generator().manual_seed(1)

    def noise(edge: int, rows: torch.Tensor) -> torch.Tensor:
        factor = 1 + 0.01 * torch.randn(rows.shape, generator=generator)
        return (rows.float() * factor).to(rows.dtype) if edge == EDGES[1] else rows

    def old(edge: int, rows: torch.Tensor) -> torch.Tensor:
        return rows.roll(7, dims=0) if edge == EDGES[1] else rows

    def of(middle: object) -> list[Span]:
        return [first, cast(Span, middle), last]

    runs = {
        "int8 for bf16": [record(of(spans(source, "int8")[1]), *text) for text in texts],
        "int4 for bf16": [record(of(spans(source, "int4")[1]), *text) for text in texts],
        "one layer skipped": [record(of(SkippingSpan(middle, 14, 15)), *text) for text in texts],
        "half of its layers": [record(of(SkippingSpan(middle, 12, 17)), *text) for text in texts],
        "noise of 1%": [record(hops, *text, tamper=noise) for text in texts],
        "activations of other rows": [record(hops, *text, tamper=old) for text in texts],
    }
    plain = [record(hops, *text) for text in texts]
    for temperature in (0.0, 0.6, 1.0):
        other = replace(SAMPLING, temperature=temperature)
        runs[f"temperature {temperature:g} for 0.8"] = [
            sampled(last, run.rows, text[1], other) for run, text in zip(plain, texts, strict=True)
        ]
    vocabulary = source.config.vocab_size
    runs["invented tokens"] = [
        replace(run, sampled=torch.randint(vocabulary, run.sampled.shape, generator=generator)) for run in plain
    ]
    return runs


@dataclass(frozen=True)
class Pair:
    """Two recordings of one text, row by row at each edge but the last: distances and whether the digests differ; and
    which sampled tokens differ."""

    distances: dict[int, Numbers]
    differ: dict[int, Flags]
    tokens: Flags

    @classmethod
    def of(cls, one: Recording, other: Recording) -> Pair:
        distances: dict[int, Numbers] = {}
        differ: dict[int, Flags] = {}
        for edge in EDGES[:-1]:
            a, b = one.rows[edge], other.rows[edge]
            distances[edge] = np.array([row_distance(x, y) for x, y in zip(a, b, strict=True)])
            ours, theirs = (row_digests(to_wire(rows, rows.dtype), len(rows)) for rows in (a, b))
            differ[edge] = np.array([x != y for x, y in zip(ours, theirs, strict=True)])
        return cls(distances, differ, (one.sampled != other.sampled).numpy())


def far(pair: Pair, rng: np.random.Generator, sessions: int, count: int) -> Flags:
    """Whether each of so many sessions of which `count` tokens are audited is found far, `[sessions]`: by the median
    over as many rows as are drawn, or by the tokens."""
    rows = min(count, POLICY.rows)
    found = np.zeros(sessions, dtype=bool)
    for values in pair.distances.values():
        apart: Flags = np.median(values[rng.integers(len(values), size=(sessions, rows))], axis=1) > POLICY.max_distance
        found = np.logical_or(found, apart)
    wrong = pair.tokens[rng.integers(len(pair.tokens), size=(sessions, count))].sum(axis=1)
    chance = np.array([chance_of(k, count, POLICY.token_mismatch) for k in range(count + 1)])
    by_tokens: Flags = chance[wrong] < POLICY.false_alarm
    return found | by_tokens


def exact(pair: Pair, rng: np.random.Generator, sessions: int, count: int) -> Flags:
    """Whether any digest or token differs, between machines that should agree bit for bit."""
    different: Flags = np.logical_or.reduce([*pair.differ.values(), pair.tokens])
    drawn: Flags = different[rng.integers(len(different), size=(sessions, count))]
    found: Flags = np.logical_or.reduce(drawn, axis=1)
    return found


Test = Callable[[Pair, np.random.Generator, int, int], Flags]


def rate(pairs: Sequence[Pair], test: Test, rng: np.random.Generator, sessions: int, count: int) -> float:
    """Sessions are spread evenly over the texts."""
    return float(np.mean([test(pair, rng, max(1, sessions // len(pairs)), count).mean() for pair in pairs]))


def pairs_of(one: Sequence[Recording], other: Sequence[Recording]) -> list[Pair]:
    return [Pair.of(a, b) for a, b in zip(one, other, strict=True)]


def detection(runs: Runs, auditor: Sequence[Recording], test: Test, sessions: int) -> Iterator[str]:
    rng = np.random.default_rng(0)
    for name, recordings in runs.items():
        pairs = pairs_of(recordings, auditor)
        rates = [rate(pairs, test, rng, sessions, count) for count in TOKENS]
        yield " | ".join((name, *(f"{value:.4f}" for value in rates)))


def spread(runs: Runs) -> Iterator[str]:
    """Of honest pairs: median and largest distance of a row, largest median of a session's rows, part of tokens."""
    rng = np.random.default_rng(1)
    for one, other in itertools.combinations(runs, 2):
        pairs = pairs_of(runs[one], runs[other])
        rows = np.concatenate([values for pair in pairs for values in pair.distances.values()])
        drawn = [
            np.median(values[rng.integers(len(values), size=(10000, POLICY.rows))], axis=1).max()
            for pair in pairs
            for values in pair.distances.values()
        ]
        tokens = np.concatenate([pair.tokens for pair in pairs]).mean()
        yield f"{one}, {other} | {np.median(rows):.4f} | {rows.max():.4f} | {max(drawn):.4f} | {tokens:.3f}"


def accusations(runs: Runs, sessions: int) -> tuple[int, int, int]:
    """-> honest sessions, and of them those found far, over all ordered pairs, and those whose bits differ although
    their arithmetic is the same."""
    rng, found, inexact, total = np.random.default_rng(2), 0, 0, 0
    kinds = list(itertools.product(runs, repeat=2))
    for one, other in kinds:
        pairs = pairs_of(runs[one], runs[other])
        for pair in pairs:
            count = max(1, sessions // (len(kinds) * len(pairs)) + 1)
            total += count
            found += int(far(pair, rng, count, 200).sum())
            inexact += int(exact(pair, rng, count, 200).sum()) if one == other else 0
    return total, found, inexact


def bench(texts_each: int, sessions: int) -> None:
    cpu_library.set_threads(1)
    model = open_model("smollm2-135m")
    source, tokenizer = cast(ModelSource, DitheredSource(model)), load_tokenizer(model)
    hops = spans(source, "bf16")
    calibration, reporting = (
        write_texts(hops, tokenizer, questions[:texts_each]) for questions in (CALIBRATION, REPORTING)
    )
    header = "machines | median row | largest row | largest median | tokens that differ"
    print("calibration\n" + table(header, list(spread(honest(source, calibration)))), flush=True)
    runs = honest(source, reporting)
    print("reporting\n" + table(header, list(spread(runs))), flush=True)
    total, found, inexact = accusations(runs, sessions)
    print(f"{total} honest sessions: {found} found far, {inexact} inexact", flush=True)
    tampered = cheats(source, reporting)
    tokens = "tokens audited | " + " | ".join(map(str, TOKENS))
    for name, test, auditor in (
        ("an auditor of the same arithmetic", exact, "AVX2"),
        *((f"auditor: {machine}", far, machine) for machine in MACHINES),
    ):
        print(name + "\n" + table(tokens, list(detection(tampered, runs[auditor], test, sessions // 10))), flush=True)
    decoded, prefilled = decode_time(hops, reporting[0]), prefill_time(hops, reporting[0])
    print(f"decoding a token {decoded * 1e3:.2f} ms, in a prefill {prefilled * 1e3:.2f} ms: {prefilled / decoded:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=4, help="questions of each set")
    parser.add_argument("--sessions", type=int, default=100_000)
    options = parser.parse_args()
    started = time.monotonic()
    bench(options.texts, options.sessions)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
