"""Folders for sockets go with their owners, also with those that were killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.net.libp2p.socket_dir import SocketDir, remove_stale

OWNER = "from swarm.net.libp2p.socket_dir import SocketDir as F; f = F(); print(f.path, flush=True); input()"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_a_folder_goes_when_it_is_removed(place: Path) -> None:
    folder = SocketDir()
    assert folder.path.parent == place
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "socket").touch()
    folder.remove()
    folder.remove()
    assert list(place.iterdir()) == []


def test_what_a_killed_owner_left_goes_with_the_next_start_and_not_before(place: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().decode().strip())
        (left / "socket").touch()
        first = SocketDir()
        assert left.exists()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    second = SocketDir()
    assert set(place.iterdir()) == {first.path, second.path}
    first.remove()
    second.remove()


def test_what_is_not_ours_stays(place: Path) -> None:
    target = place / "target"
    target.write_text("precious")
    (place / "swarm-unowned").mkdir(0o700)
    (place / "swarm-file").write_text("")
    shared = place / "swarm-shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "owner").symlink_to(target)
    aside = place / "aside"
    aside.mkdir(0o700)
    (aside / "owner").write_text("")
    (place / "swarm-link").symlink_to(aside)
    before = sorted(os.listdir(place))
    remove_stale(place)
    assert sorted(os.listdir(place)) == before
    assert target.read_text() == "precious"
    assert (aside / "owner").exists()


def test_what_was_left_before_it_was_locked_goes_once_it_is_old(place: Path) -> None:
    old, young, other = (place / f"swarm-{name}" for name in ("old", "young", "other"))
    for folder in (old, young, other):
        folder.mkdir(0o700)
        (folder / "owner.new").touch()
    (other / "notes").touch()
    for folder in (old, other):
        os.utime(folder, (1e9, 1e9))
    remove_stale(place)
    assert set(place.iterdir()) == {young, other}


def test_a_block_has_a_folder_of_its_own(place: Path) -> None:
    with SocketDir() as path:
        (path / "socket").touch()
        remove_stale(place)
        assert path.exists()
    assert list(place.iterdir()) == []
