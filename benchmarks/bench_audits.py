"""Audits on recorded rows of SmolLM2: which cheats are found after how many tokens, and who is accused by mistake.

    nice python benchmarks/record_audit_rows.py FOLDER
    nice python benchmarks/bench_audits.py FOLDER [--part reporting] [--sessions 100000] [--compiled] [--dtype int8]

A session is a text, an audited machine, a replay and a third, all drawn; its rows and tokens are drawn from what was
recorded. `--compiled`: our kernels alone, whose limits are closer. The rules are those of
`swarm.planner.auditing.verdict`, on arrays. Thresholds may be set by what `--part calibration` shows; figures are those
of `--part reporting`.
"""

from __future__ import annotations

import argparse
import itertools
import pickle
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from audit_machines import MACHINES, DitheredSource
from audit_rows import (
    INNER,
    OPTIONS,
    REPLAY,
    SEEDS,
    Claims,
    Flags,
    Folder,
    Numbers,
    Recorded,
    Sampled,
    TextNumbers,
    drawn,
    numbers,
)
from kernel_timing import table
from record_audit_rows import FORMATS, WAYS, WRITER

from swarm.planner.auditing.policy import POLICY, HonestSpread
from swarm.planner.auditing.verdict import too_far, too_far_apart
from swarm.types import Sampling
from swarm_kernels.models.open import open_model
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops.cpu import cpu_library

Places = npt.NDArray[np.int64]
TOKENS = (1, 4, 12, 50, 200)
VOCABULARY = 49152
SESSION = 200  # tokens of an honest one
NONE = len(INNER) + 1  # the edge that is far, where none is; len(INNER) stands for the tokens


@dataclass(frozen=True)
class Sessions:
    """Positions `[sessions, rows]` and `[sessions, tokens]`, none twice, and the sample of each: one option a session,
    and as many seeds as have the tokens."""

    rows: Places
    tokens: Places
    sample: Places  # [sessions, tokens]

    @classmethod
    def draw(cls, rng: np.random.Generator, count: int, tokens: int, margins: Numbers) -> Sessions:
        draws, answer = margins.shape
        rows = rng.permuted(np.tile(np.arange(answer), (count, 1)), axis=1)[:, : min(tokens, POLICY.rows)]
        of_seeds = rng.permuted(np.tile(np.arange(answer * len(SEEDS)), (count, 1)), axis=1)[:, :tokens]
        option = rng.integers(draws // len(SEEDS), size=count) * len(SEEDS)
        return cls(rows, of_seeds % answer, option[:, None] + of_seeds // answer)

    def total(self, margins: Numbers) -> Numbers:
        """Of the tokens' margins, as they count."""
        return cast(Numbers, np.minimum(margins[self.sample, self.tokens], POLICY.max_margin).sum(axis=1))

    def spread(self, dtype: str, a: str, b: str) -> HonestSpread:
        """Of the rows of two machines."""
        return POLICY.spread(dtype, named=_named(a) and _named(b) and self.rows.shape[1] >= POLICY.few_rows)

    def first_far(self, dtype: str, a: str, b: str, rows: Mapping[int, Numbers], margins: Numbers) -> Places:
        """The first edge at which two machines of unlike arithmetic are far apart, `[sessions]`."""
        spread = self.spread(dtype, a, b)
        far = [np.median(rows[edge][self.rows], axis=1) > too_far_apart(edge, spread) for edge in INNER]
        of_tokens = POLICY.spread(dtype, named=_named(a) and _named(b))
        far.append(self.total(margins) > too_far(self.tokens.shape[1], of_tokens))
        flags = np.stack([*far, np.ones_like(far[0])], axis=1)
        return cast(Places, flags.argmax(axis=1))


def _named(machine: str) -> bool:
    return MACHINES[machine.split(",")[0]].named if machine.split(",")[0] in MACHINES else True  # a cheat, that lies


def outcome(dtype: str, found: TextNumbers, a: str, b: str, c: str, sessions: Sessions) -> tuple[Flags, Flags, Flags]:
    """-> whether `a` and its replay `b` dispute; `a` is accused, with the third `c`; `b` is."""
    of_a, of_b = (np.minimum(found.margins[a, replay], POLICY.max_margin) for replay in (b, c))
    at = sessions.first_far(dtype, a, b, found.rows[a, b], of_a)
    ours = sessions.first_far(dtype, a, c, found.rows[a, c], of_b)
    theirs = sessions.first_far(dtype, b, c, found.rows[b, c], np.abs(of_a - of_b))
    disputed = at < NONE
    return disputed, disputed & (ours == at) & (theirs > at), disputed & (theirs == at) & (ours > at)


def spread(dtype: str, found: Sequence[TextNumbers], audited: Sequence[str], replays: Sequence[str]) -> Iterator[str]:
    """Of honest pairs: rows that differ little, tokens that do, and the nearest that sessions come to the limits."""
    rng = np.random.default_rng(1)
    for a, b in itertools.product(audited, replays):
        if a == b:  # one recording
            continue
        rows = np.concatenate([values for text in found for values in text.rows[a, b].values()])
        margins = np.concatenate([text.margins[a, b].ravel() for text in found])
        nearest, budget = 0.0, 0.0
        for text in found:
            sessions = Sessions.draw(rng, 300, SESSION, text.margins[a, b])
            nearest = max(nearest, *(float(np.median(v[sessions.rows], 1).max()) for v in text.rows[a, b].values()))
            limit = too_far(SESSION, POLICY.spread(dtype, named=_named(a) and _named(b)))
            budget = max(budget, float(sessions.total(text.margins[a, b]).max()) / limit)
        if rows.max() or margins.max():
            yield (
                f"{a} | {b} | {np.median(rows):.4f} | {rows.max():.4f} | {nearest:.4f} | {(margins > 0).mean():.3f} | "
                f"{np.minimum(margins, POLICY.max_margin).mean():.5f} | {budget:.2f}"
            )


def accusations(
    dtype: str, found: Sequence[TextNumbers], audited: Sequence[str], replays: Sequence[str], least: int
) -> Iterator[str]:
    """Honest sessions over all triples of machines and all texts."""
    rng = np.random.default_rng(2)
    triples = list(itertools.product(audited, replays, replays))
    count = -(-least // (len(triples) * len(found)))
    total = disputes = accused = 0
    worst: dict[tuple[str, str], int] = {}
    for text, (a, b, c) in itertools.product(found, triples):
        if a in (b, c):  # one recording
            continue
        sessions = Sessions.draw(rng, count, SESSION, text.margins[a, b])
        disputed, ours, theirs = outcome(dtype, text, a, b, c, sessions)
        total, disputes = total + count, disputes + int(disputed.sum())
        accused += int((ours | theirs).sum())
        worst[a, b] = worst.get((a, b), 0) + int(disputed.sum())
    yield f"{total} honest sessions of {SESSION} tokens: {disputes} disputes, {accused} accusations"
    for pair, disputed_here in sorted(worst.items(), key=lambda item: -item[1])[:5]:
        if disputed_here:
            yield f"  disputes of {pair[0]} with {pair[1]}: {disputed_here} of {total // len(worst)}"


def same_arithmetic(folder: Folder, machines: Sequence[str]) -> Iterator[str]:
    """Where bits are compared: a machine's answers, alone and in company, against its own replay."""
    for machine in machines:
        if MACHINES[machine].named:
            replays = folder.recorded(machine, REPLAY)
            for way in ("decoded", "batched"):
                if not folder.has(machine, way):
                    continue
                pairs = list(zip(folder.recorded(machine, way), replays, strict=True))
                rows = sum(len(one.rows[edge]) for one, _ in pairs for edge in one.rows)
                wrong = sum(
                    int((one.rows[e] != other.rows[e]).any(dim=1).sum()) for one, other in pairs for e in one.rows
                )
                yield f"{machine}, {way} | {rows} | {wrong}"


def distinct(folder: Folder, machines: Sequence[str]) -> list[str]:
    """Without those that compute the same bits as one before them: to audits they are one."""
    found: dict[str, list[Recorded]] = {}
    for machine in machines:
        runs = folder.recorded(machine, REPLAY)
        like = next((name for name, others in found.items() if all(map(equal, runs, others))), None)
        if like is None:
            found[machine] = runs
        else:
            print(f"{machine} computes the same bits as {like}")
    return list(found)


def equal(one: Recorded, other: Recorded) -> bool:
    return all(bool((rows == other.rows[edge]).all()) for edge, rows in one.rows.items())


def honest(folder: Folder, replays: Sequence[str], ways: Sequence[tuple[str, str]]) -> list[TextNumbers]:
    """Of each text; kept in the folder, for it takes minutes."""
    path = folder.path / f"numbers-{len(replays)}-{folder.part}.pickle"
    if path.exists():
        return cast(list[TextNumbers], pickle.loads(path.read_bytes()))
    found: list[TextNumbers] = []
    runs = {(name, way): folder.recorded(name, way) for name, way in {*ways, *((name, REPLAY) for name in replays)}}
    for text in range(len(folder.texts)):
        ours = [runs[way][text] for way in ways]
        found.append(numbers(ours, [runs[name, REPLAY][text] for name in replays], drawn(OPTIONS), honest_claims))
        for recorded in runs.values():
            recorded[text].forget()
        print(f"text {text + 1}", file=sys.stderr, flush=True)
    path.write_bytes(pickle.dumps(found))
    return found


def detection(
    dtype: str, found: Sequence[TextNumbers], name: str, audited: str, replays: Sequence[str], least: int
) -> str:
    """Parts of the sessions in which a cheat is accused: bit for bit by a machine of its own arithmetic; by two others,
    on average over all pairs of them, and by the least able pair."""
    rng = np.random.default_rng(3)
    pairs = list(itertools.permutations(replays, 2))
    count = max(20, -(-least // (len(pairs) * len(found))))
    cells = []
    for tokens in TOKENS:
        bits, rates = [], np.zeros((len(found), len(pairs)))
        for i, text in enumerate(found):
            differ = text.differ[audited, WRITER]
            bits.append(differ[rng.integers(differ.size, size=(1000, tokens))].any(axis=1).mean())
            for j, (b, c) in enumerate(pairs):
                sessions = Sessions.draw(rng, count, tokens, text.margins[audited, b])
                rates[i, j] = outcome(dtype, text, audited, b, c, sessions)[1].mean()
        by_pair = rates.mean(axis=0)
        cells.append(f"{np.mean(bits):.3f} / {by_pair.mean():.3f} / {by_pair.min():.3f}")
    return " | ".join((name, *cells))


def honest_claims(one: Recorded) -> Sampled:
    return one.sampled(drawn(OPTIONS))


def _sampled(options: Sequence[Sampling], one: Recorded) -> Sampled:
    return one.sampled(options)


def token_cheats(declared: Sampling) -> Iterator[tuple[str, Claims]]:
    """What a tail may say that it sampled."""
    options = drawn([declared])
    for temperature in (0.0, declared.temperature - 0.2, declared.temperature + 0.2):
        changed = [replace(option, temperature=temperature) for option in options]
        yield f"temperature {temperature:g} for {declared.temperature:g}", partial(_sampled, changed)
    other = [replace(option, seed=option.seed + 100) for option in options]
    yield f"another seed, temperature {declared.temperature:g}", lambda one: one.sampled(other)

    def invented(one: Recorded) -> Sampled:
        return np.random.default_rng(one.prompt).integers(VOCABULARY, size=one.sampled(options).shape)

    yield "invented tokens", invented


def cheats(folder: Folder, replays: Sequence[str], least: int) -> Iterator[str]:
    by_text = list(zip(*(folder.recorded(name, REPLAY) for name in replays), strict=True))
    options = drawn(OPTIONS[:1])
    for name, runs in folder.cheats(WRITER).items():
        found = [
            numbers([one], others, options, lambda o: o.sampled(options))
            for one, others in zip(runs, by_text, strict=True)
        ]
        yield detection(folder.dtype, found, name, name, replays, least)
    honest = folder.recorded(WRITER, "decoded")
    for declared in OPTIONS[:1]:
        mine = drawn([declared])
        for name, claims in token_cheats(declared):
            found = [numbers([one], others, mine, claims) for one, others in zip(honest, by_text, strict=True)]
            yield detection(folder.dtype, found, name, honest[0].name, replays, least)


def bench(path: Path, part: str, least: int, texts: int, only: str, dtype: str, compiled: bool) -> None:
    cpu_library.set_threads(1)
    folder = Folder(path, part, cast(ModelSource, DitheredSource(open_model("smollm2-135m"))), texts, dtype)
    kinds = [name for name, machine in MACHINES.items() if machine.named or not compiled]
    machines = [name for name in kinds if folder.has(name, REPLAY)]
    replays = distinct(folder, machines)
    # of our kernels a replay has the bits of decoding (`same_arithmetic`), and stands for it
    ways = [
        (name, way)
        for name in replays
        for way in WAYS
        if folder.has(name, way)
        and (way in (REPLAY, "drafted") if MACHINES[name].named else way != REPLAY or not folder.has(name, "decoded"))
    ]
    print(table("same arithmetic | rows | that differ", list(same_arithmetic(folder, machines))), flush=True)
    if only != "honest":
        print("accused, of cheats: bit for bit / by two others / by the least able two", flush=True)
        print(table("tokens audited | " + " | ".join(map(str, TOKENS)), list(cheats(folder, replays, least // 10))))
    if only == "cheats":
        return
    found = honest(folder, replays, ways)
    names = [name if way == REPLAY else f"{name}, {way}" for name, way in ways]
    header = (
        "audited | replay | median row | largest | largest median | tokens that differ | mean margin | part of limit"
    )
    print(
        f"{part}: {len(found)} texts\n" + table(header, list(spread(folder.dtype, found, names, replays))), flush=True
    )
    print("\n".join(accusations(folder.dtype, found, names, replays, least)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", default="reporting", choices=("calibration", "reporting"))
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--texts", type=int, default=10)
    parser.add_argument("--only", choices=("honest", "cheats", "both"), default="both")
    parser.add_argument("--dtype", default="bf16", choices=FORMATS, help="that the folder was recorded with")
    parser.add_argument("--compiled", action="store_true", help="between our compiled kernels alone")
    options = parser.parse_args()
    started = time.monotonic()
    bench(
        options.folder,
        options.part,
        options.sessions,
        options.texts,
        options.only,
        options.dtype,
        options.compiled,
    )
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
