"""Records the rows that `bench_audits` draws sessions from: on every kind of machine, and of every cheat.

    nice python benchmarks/record_audit_rows.py FOLDER [MACHINE ...] [--dtype int8]

Each kind runs in a process of its own, since torch takes its instruction set from the environment. The texts are
written first, by the first kind. What FOLDER already has is kept.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from audit_machines import EDGES, MACHINES, DitheredSource, hash_of
from audit_prompts import CALIBRATION, REPORTING
from audit_recording import (
    Rows,
    SkippingSpan,
    Text,
    batched,
    decoded,
    drafted,
    prefilled,
    tampered,
    unchanged,
    write_text,
)

from swarm_kernels.models.open import open_model
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops.cpu import cpu_library
from swarm_kernels.runtime.span import Span
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer, load_tokenizer

SETS = {"calibration": CALIBRATION, "reporting": REPORTING}
FORMATS = ("fp32", "bf16", "int8", "int4")
WRITER = "avx512"  # with BF16 instructions it computes the same bits
CHEATS = "cheats"

Recorder = Callable[[Sequence[Span], Sequence[Text]], list[Rows]]
WAYS: dict[str, Recorder] = {
    "prefilled": lambda hops, texts: [prefilled(hops, text) for text in texts],
    "decoded": lambda hops, texts: [decoded(hops, text) for text in texts],
    "batched": batched,
    "drafted": lambda hops, texts: [drafted(hops, text) for text in texts],
}


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def kept(path: Path, make: Callable[[], object]) -> Any:
    """What `path` holds, made first if need be."""
    if not path.exists():
        started = time.monotonic()
        made = make()
        part = path.with_suffix(".part")
        torch.save(made, part)
        part.rename(path)
        print(f"{path.name} {time.monotonic() - started:.0f} s", flush=True)
    return load(path)


def cheats(source: ModelSource, hops: Sequence[Span], texts: Sequence[Text], dtype: str) -> dict[str, list[Rows]]:
    """What the middle hop of the first kind of machine may do instead of its work -> rows of each text."""
    first, middle, last = hops
    generator = torch.Generator().manual_seed(hash_of("noise"))
    others = iter([tampered(hops, text, unchanged)[EDGES[1]] for text in (texts[-1], *texts[:-1])])

    def noise(rows: torch.Tensor) -> torch.Tensor:
        factor = 1 + 0.01 * torch.randn(rows.shape, generator=generator)
        return (rows.float() * factor).to(rows.dtype)

    def earlier(rows: torch.Tensor) -> torch.Tensor:
        return rows.roll(7, dims=0)

    def other_text(rows: torch.Tensor) -> torch.Tensor:
        old = next(others)
        return torch.cat([old[: len(rows)], rows[len(old) :]]) if len(old) < len(rows) else old[: len(rows)]

    def of(middle: object, tamper: Callable[[torch.Tensor], torch.Tensor] = unchanged) -> list[Rows]:
        return [tampered([first, cast(Span, middle), last], text, tamper) for text in texts]

    machine = MACHINES[WRITER]
    fewer_bits = FORMATS[FORMATS.index(dtype) + 1 :]
    return {
        **{f"{less} for {dtype}": of(machine.spans(source, less)[1]) for less in fewer_bits},
        "one layer skipped": of(SkippingSpan(middle, 14, 15)),
        "a smaller model: half of the layers": of(SkippingSpan(middle, 12, 17)),
        "noise of 1%": of(middle, noise),
        "replayed rows of this answer": of(middle, earlier),
        "replayed rows of another answer": of(middle, other_text),
    }


def texts_of(hops: Sequence[Span], tokenizer: ChatTokenizer, questions: Sequence[str]) -> list[Text]:
    return [write_text(hops, tokenizer, question) for question in questions]


def record(folder: Path, name: str, ways: Sequence[str], dtype: str, texts_each: int, parts: Sequence[str]) -> None:
    """These ways of one kind of machine, or the cheats. `dtype`: of the weights, of all in one folder. `texts_each`: of
    a set, if they are not there yet. `parts`: the sets."""
    cpu_library.set_threads(1)
    model = open_model("smollm2-135m")
    source = cast(ModelSource, DitheredSource(model))
    hops = MACHINES[WRITER if name == CHEATS else name].spans(source, dtype)
    for part in parts:
        write = partial(texts_of, hops, load_tokenizer(model), SETS[part][:texts_each])
        texts = kept(folder / f"texts-{part}.pt", write)
        if name == CHEATS:
            kept(folder / f"{CHEATS}-{part}.pt", partial(cheats, source, hops, texts, dtype))
            continue
        for way in ways:
            kept(folder / f"{name}-{way}-{part}.pt", partial(WAYS[way], hops, texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("machine", nargs="*", help=f"of {', '.join(MACHINES)}, {CHEATS}; all if none is named")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="torch is slow under AVX2")
    parser.add_argument("--dtype", default="bf16", choices=FORMATS, help="of the weights; one folder, one format")
    parser.add_argument("--texts", type=int, default=len(CALIBRATION), help="of each set; one folder, one number")
    parser.add_argument("--parts", nargs="+", default=list(SETS), choices=list(SETS), help="sets of texts")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.here:
        for name in options.machine:
            record(options.folder, name, options.ways, options.dtype, options.texts, options.parts)
        return
    for name in options.machine or [*MACHINES, CHEATS]:
        environment = MACHINES[name].environment if name in MACHINES else {}
        command = [sys.executable, __file__, str(options.folder), name, "--here", "--dtype", options.dtype]
        command += ["--texts", str(options.texts), "--ways", *options.ways, "--parts", *options.parts]
        subprocess.run(command, env={**os.environ, **environment}, check=True)


if __name__ == "__main__":
    main()
