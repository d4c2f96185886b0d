"""A minute of fuzzing, and everything it ever found: the corpora hold the inputs that failed before their fix."""

from __future__ import annotations

from pathlib import Path

import fuzz
import pytest

SECONDS = 60 / len(fuzz.TARGETS)  # of each target


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_the_corpus_does_no_harm(target: str) -> None:
    module = fuzz.load(target)
    files = fuzz.corpus(target)
    assert len(files) >= len(list(module.seeds())) > 0
    for file in files:
        module.run(file.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_a_few_seconds_of_fuzzing(target: str, tmp_path: Path) -> None:
    """By coverage where atheris is installed, else blindly."""
    done = fuzz.fuzz(target, SECONDS, tmp_path / "crashes")
    assert not done.crash, f"{done.crash}\n{done.report}"
    assert done.executions > 0


def test_what_a_target_finds_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that fails is reported with its input."""

    class Broken:
        @staticmethod
        def run(data: bytes) -> None:
            assert len(data) < 3, "too long"

    monkeypatch.setattr(fuzz, "corpus", lambda _: [])
    with pytest.raises(AssertionError, match="too long"):
        fuzz._fuzz_blindly(Broken, "frames", 30.0, tmp_path)  # type: ignore[arg-type]
    (kept,) = tmp_path.iterdir()
    assert len(kept.read_bytes()) >= 3
