"""Coverage-guided fuzzing of everything that decodes what strangers send: `make fuzz MINUTES=10`.

Each target of `targets/` runs in a process of its own for its share of the time, from its corpus in `corpora/`. With
`atheris` (libFuzzer for Python; the set-up installs it where it has wheels) mutations are guided by the branches of our
code; without it a plain mutator changes the corpus blindly, which is said in the report. An input that raises is kept
in `--crashes` and is added to the corpus by hand, with the fix. `--grow` keeps inputs that reached new branches.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
CORPORA = HERE / "corpora"
TARGETS = tuple(sorted(file.stem for file in (HERE / "targets").glob("[a-z]*.py")))
MAX_INPUT = 1 << 14  # bytes
MAX_SECONDS = 60  # for one input, more is a hang
MAX_MEMORY_MB = 3072
ENGINE = "atheris" if importlib.util.find_spec("atheris") else "plain"


@dataclass(frozen=True, slots=True)
class FuzzRun:
    """What one target did. `crash`: the file with the input that raised, "" if none did."""

    target: str
    engine: str
    executions: int
    seconds: float
    crash: str = ""
    report: str = ""


def fuzz(target: str, seconds: float, crashes: Path, grow: Path | None = None, engine: str = ENGINE) -> FuzzRun:
    """Run one target in a process of its own."""
    crashes.mkdir(parents=True, exist_ok=True)
    known = set(crashes.iterdir())
    # A shell starts it, so that the memory of a large program that called us does not count as its own.
    command = ["sh", "-c", '"$@"; exit $?', "fuzz", sys.executable, str(HERE / "fuzz.py")]
    command += ["--child", target, "--engine", engine, "--crashes", str(crashes)]
    command += ["--seconds", str(seconds), *(["--grow", str(grow)] if grow else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    started = time.monotonic()
    with tempfile.TemporaryFile() as log:
        code = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode
        log.seek(0)
        report = log.read().decode("utf-8", "replace")
    counted = re.findall(r"stat::number_of_executed_units: (\d+)|Done (\d+) in ", report)
    progress = re.findall(r"^#(\d+)\s", report, re.MULTILINE)  # of a run that crashed
    executions = max((int(n) for pair in counted for n in pair if n), default=int(progress[-1]) if progress else 0)
    found = sorted(set(crashes.iterdir()) - known)
    crash = str(found[0]) if found else ("no input was kept" if code else "")
    return FuzzRun(target, engine, executions, time.monotonic() - started, crash, report[-6000:] if crash else "")


def load(target: str, engine: str = "plain") -> ModuleType:
    """The module of a target, its code instrumented for atheris."""
    name = f"targets.{target}"
    if engine != "atheris":
        return importlib.import_module(name)
    import atheris

    source = (HERE / "targets" / f"{target}.py").read_text(encoding="utf-8")
    listed = re.search(r"^INSTRUMENT = (\(.*?\))$", source, re.MULTILINE | re.DOTALL)
    assert listed, f"{target} does not say what to instrument"
    with atheris.instrument_imports(include=re.findall(r'"([^"]+)"', listed[1])):
        return importlib.import_module(name)


def corpus(target: str) -> list[Path]:
    return sorted((CORPORA / target).glob("*"))


def _child(target: str, engine: str, seconds: float, crashes: Path, grow: Path | None) -> None:
    module = load(target, engine)
    if engine == "plain":
        _fuzz_blindly(module, target, seconds, crashes)
        return
    import atheris

    folders = [str(folder) for folder in ([grow / target] if grow else []) + [CORPORA / target]]
    for folder in folders:
        Path(folder).mkdir(parents=True, exist_ok=True)
    if not grow:  # libFuzzer writes into its first folder
        scratch = tempfile.mkdtemp()
        folders.insert(0, scratch)
    options = [
        f"-max_total_time={max(1, round(seconds))}",
        f"-artifact_prefix={crashes}/{target}-",
        "-use_value_profile=0",
    ]
    options += [f"-max_len={MAX_INPUT}", f"-timeout={MAX_SECONDS}", f"-rss_limit_mb={MAX_MEMORY_MB}"]
    options += ["-report_slow_units=3600"]  # by the clock, and a busy machine is slow: MAX_SECONDS tells a hang
    atheris.Setup([sys.argv[0], *options, "-print_final_stats=1", *folders], module.run)
    atheris.Fuzz()


def _fuzz_blindly(module: ModuleType, target: str, seconds: float, crashes: Path) -> None:
    """Without coverage: random changes to the corpus, the same ones every time."""
    rng = random.Random(target)
    known = [file.read_bytes() for file in corpus(target)] or [b""]
    count, started = 0, time.monotonic()
    while time.monotonic() - started < seconds:
        data = known[count] if count < len(known) else _mutated(rng, known)
        before = time.monotonic()
        try:
            module.run(data)
            assert time.monotonic() - before < MAX_SECONDS, "it hangs"
        except BaseException:
            (crashes / f"{target}-{hashlib.sha1(data, usedforsecurity=False).hexdigest()}").write_bytes(data)
            raise
        count += 1
    print(f"Done {count} in {time.monotonic() - started:.1f} s")


def _mutated(rng: random.Random, known: list[bytes]) -> bytes:
    data = bytearray(rng.choice(known))
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at, kind = rng.randrange(len(data) + 1), rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xC0, 0xFF, rng.randrange(256)))
        elif kind == 2:
            del data[at : at + rng.choice((1, 2, 4, 8, 64))]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8)))
        elif kind == 4:
            other = rng.choice(known)
            start = rng.randrange(len(other) + 1)
            data[at : at + rng.randrange(64)] = other[start : start + rng.randrange(64)]
        else:
            data[at : at + 8] = rng.choice((0, 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63)).to_bytes(8, "little")
    return bytes(data[:MAX_INPUT])


def _seed() -> None:
    for target in TARGETS:
        folder = CORPORA / target
        folder.mkdir(parents=True, exist_ok=True)
        for data in load(target).seeds():
            (folder / hashlib.sha1(data, usedforsecurity=False).hexdigest()[:16]).write_bytes(data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="for all targets together")
    parser.add_argument("--seconds", type=float, help="for each target, instead")
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--engine", choices=("atheris", "plain"), default=ENGINE)
    parser.add_argument("--crashes", type=Path, default=Path("fuzz-crashes").absolute())
    parser.add_argument("--grow", type=Path, help="a folder for inputs that reached new branches")
    parser.add_argument("--seed", action="store_true", help="write the valid inputs of each target into its corpus")
    parser.add_argument("--child", choices=TARGETS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(options.child, options.engine, options.seconds, options.crashes, options.grow)
        return 0
    if options.seed:
        _seed()
        return 0
    targets = options.target or TARGETS
    seconds = options.seconds or options.minutes * 60 / len(targets)
    if options.engine == "plain":
        print("without atheris: the mutations are not guided by coverage")
    total, failed = 0, 0
    for target in targets:
        done = fuzz(target, seconds, options.crashes, options.grow, options.engine)
        total += done.executions
        failed += bool(done.crash)
        print(json.dumps({k: v for k, v in asdict(done).items() if k != "report"}), flush=True)
        if done.crash:
            print(done.report, flush=True)
    print(f"{total} executions of {len(targets)} targets, {failed} with a crash")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
