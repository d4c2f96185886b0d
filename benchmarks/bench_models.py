"""Which models are served, and whether each gives transformers' tokens: one table, over tiny random models.

    python benchmarks/bench_models.py [--quick] [--all] [--write docs/models.md] [TYPE ...]

Every model of `zoo.families`: 64 greedy tokens over every cut of its four layers into 1, 2 and 3 spans, a tree and what
grows on a committed path of it, a rollback, a hop lost and replayed, keys and values handed over to another cache, and
the hidden states after every layer. `--quick`: without the generations and the rollback. `--all`: every causal type
that transformers has, in every variant of its config that `zoo.variants` knows, likewise. Exits with 1 if a model is
served and differs.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "kernels"))

from zoo.compare import TOKENS, Verdict, compare
from zoo.families import FAMILIES
from zoo.shrink import NotTiny, tiny_config
from zoo.variants import variants

_MARKS = ("<!-- make models: begin -->", "<!-- make models: end -->")


def main() -> int:
    parser = argparse.ArgumentParser(description="Which models are served, and whether their tokens are transformers'.")
    parser.add_argument("types", nargs="*", help="of transformers, with --all; by default every causal type")
    parser.add_argument("--quick", action="store_true", help="hidden states, logits and trees only")
    parser.add_argument("--all", action="store_true", help="every causal type and variant, without generations")
    parser.add_argument("--write", type=Path, help="a document whose table is replaced by this run's")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    lines, wrong = [], 0
    for line, bad in _all_types(options.types) if options.all else _families(thorough=not options.quick):
        print(line, flush=True)
        lines.append(line)
        wrong += bad
    if options.write:
        _write(options.write, lines)
    return 1 if wrong else 0


def _families(thorough: bool) -> Iterator[tuple[str, bool]]:
    """A table in Markdown, and of each line whether it says that a model is served and wrong."""
    compared = (
        f"{TOKENS} tokens over every cut, tree, rollback, kill, transfer" if thorough else "tree, chunks of a text"
    )
    yield f"transformers {transformers.__version__}, torch {torch.__version__}, fp32.", False
    yield "", False
    yield f"| model | runs on | {compared} | hidden states | logits |", False
    yield "|---|---|---|---|---|", False
    for name, (kind, changes) in FAMILIES.items():
        verdict = compare(tiny_config(kind, **changes), thorough=thorough)
        yield f"| {name} | {_row(verdict)} |", verdict.word == "WRONG"


def _row(verdict: Verdict) -> str:
    if verdict.refused:
        return f"refused | {verdict.refused} | | "
    result = "equal" if not verdict.wrong else "**WRONG**: " + ", ".join(verdict.wrong)
    runs_on = "compiled kernels" if verdict.fast else "transformers' layers"
    return f"{runs_on} | {result} | {max(verdict.edges):.0e} | {verdict.logits:.0e}"


def _all_types(kinds: list[str]) -> Iterator[tuple[str, bool]]:
    for kind in kinds or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            tried = variants(kind)
        except NotTiny as error:
            yield f"{kind:24} not tried: {error}", False
            continue
        counts = {"equal": 0, "refused": 0, "WRONG": 0}
        first = ""
        for name, changes in tried:
            verdict = _verdict(kind, changes)
            if isinstance(verdict, str):
                first = first or verdict
                if not name:
                    break
                continue
            counts[verdict.word] += 1
            first = first or verdict.refused
            if verdict.wrong:
                yield f"{kind:24} WRONG {name}: {', '.join(verdict.wrong)}, logits {verdict.logits:.1e}", True
            if verdict.refused and not name:
                break
        yield f"{kind:24} equal {counts['equal']:3} refused {counts['refused']:3} {first[:160]}", False


def _verdict(kind: str, changes: dict[str, object]) -> Verdict | str:
    """A sentence where transformers itself cannot run such a tiny model."""
    try:
        return compare(tiny_config(kind, **changes), thorough=False)
    except NotTiny as error:
        return f"not tried: {error}"
    except Exception as error:  # a random config that transformers accepts and then cannot run, in any way it likes
        if _is_ours(error):
            raise
        return f"transformers cannot run it so small: {str(error).splitlines()[0] if str(error) else error!r}"


def _is_ours(error: BaseException) -> bool:
    trace, files = error.__traceback__, []
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return any("swarm_kernels" in file for file in files)


def _write(path: Path, lines: list[str]) -> None:
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(_MARKS[0])
    after = rest.split(_MARKS[1])[1]
    path.write_text(f"{before}{_MARKS[0]}\n\n" + "\n".join(lines) + f"\n\n{_MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
