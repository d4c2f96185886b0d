"""The node as a service: what managers are told, what is written and deleted. The managers are scripts that note calls;
that a real one starts the node is tried by hand (docs/guide/service.md)."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.errors import ResourceError, UsageError
from swarm_node.service import footprint, manager
from swarm_node.service.definition import (
    PROGRAM_BYTES,
    ServiceDefinition,
    environment_text,
    launchd_plist,
    systemd_unit,
)

SYSTEMCTL = """#!/bin/sh
echo "$@" >> "$CALLS"
test "$2" != show || cat <<END
ActiveState=active
SubState=running
MainPID=77
NRestarts=2
MemoryCurrent=[not set]
CPUUsageNSec=1500000000
END
test "$2" != "$FAILS" || { echo "no bus here" >&2; exit 1; }
"""
WORDS = ["a", "two words", 'a "quote"', "back\\slash", "100%", "$HOME", "ümlaut"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user whose `systemctl` and `loginctl` note their calls in `calls`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("systemctl", "loginctl"):
        (programs / name).write_text(SYSTEMCTL)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("FAILS", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "swarm"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path


def calls(home: Path) -> list[str]:
    return (home / "calls").read_text().splitlines() if (home / "calls").exists() else []


def swarm_node(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "swarm_node", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def service(**changed: object) -> ServiceDefinition:
    given = {
        "command": ["/usr/bin/python3", "-m", "swarm_node", "join", *WORDS],
        "folders": [Path("/home/me/my models")],
        "log_file": Path("/home/me/log"),
        "environment_file": Path("/home/me/service.env"),
        "secrets": {"SWARM_SECRET": 'pass"word\\'},
    }
    return ServiceDefinition(**{**given, **changed})  # type: ignore[arg-type]


def values(unit: str, key: str) -> list[str]:
    return [line.split("=", 1)[1] for line in unit.splitlines() if line.startswith(f"{key}=")]


def unquoted(line: str) -> list[str]:
    """What systemd makes of a command line (systemd.service(5)), of the cases that occur here."""
    words, word, quoted = [], "", False
    letters = iter(line)
    for letter in letters:
        if letter == '"':
            quoted = not quoted
        elif letter == " " and not quoted:
            words, word = [*words, word], ""
        else:
            word += next(letters) if letter == "\\" else letter
    assert not quoted
    words.append(word)
    return [word.replace("$$", "$").replace("%%", "%") for word in words]


def test_systemd_reads_the_same_words() -> None:
    (line,) = values(systemd_unit(service()), "ExecStart")
    assert unquoted(line) == ["/usr/bin/python3", "-m", "swarm_node", "join", *WORDS]


def test_no_secret_is_in_the_unit() -> None:
    assert "pass" not in systemd_unit(service())
    assert environment_text(service().secrets) == 'SWARM_SECRET="pass\\"word\\\\"\n'


def test_caps_follow_the_flags() -> None:
    without = systemd_unit(service())
    assert not values(without, "MemoryMax")
    assert not values(without, "CPUQuota")
    with_both = systemd_unit(service(max_memory=6_000_000_000, cpu_percent=150))
    assert values(with_both, "MemoryMax") == [str(6_000_000_000 + PROGRAM_BYTES)]
    assert values(with_both, "CPUQuota") == ["150%"]


def test_only_its_folders_are_writable() -> None:
    unit = systemd_unit(service())
    assert values(unit, "ReadWritePaths") == ['"/home/me/my models"']
    assert values(unit, "ProtectSystem") == ["strict"]
    assert values(unit, "NoNewPrivileges") == ["yes"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_knows_every_key(tmp_path: Path) -> None:
    unit = tmp_path / "swarm-node.service"
    unit.write_text(systemd_unit(service(command=[sys.executable, *WORDS], max_memory=1 << 30, cpu_percent=50)))
    command = ["systemd-analyze", "--user", "verify", str(unit)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    said = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False).stderr
    lines = [line for line in said.splitlines() if "swarm-node.service" in line]
    newer = ("RestartSteps", "RestartMaxDelaySec")  # systemd 254
    assert [line for line in lines if not any(key in line for key in newer)] == []


def test_launchd_reads_the_same_words() -> None:
    agent = plistlib.loads(launchd_plist(service(environment={"SWARM_HOME": "/x"})))
    assert agent["ProgramArguments"][4:] == WORDS
    assert agent["EnvironmentVariables"] == {"SWARM_HOME": "/x", "SWARM_SECRET": 'pass"word\\'}
    assert agent["KeepAlive"] == {"SuccessfulExit": False}


@pytest.mark.skipif(sys.platform != "linux", reason="systemd")
class TestSystemd:
    def test_install_and_uninstall(self, home: Path) -> None:
        done = swarm_node("service", "install", "--secret", "hush", "--max-memory", "6GB", "--name", "my node")
        assert done.returncode == 0, done.stderr
        unit = home / "config/systemd/user/swarm-node.service"
        (line,) = values(unit.read_text(), "ExecStart")
        words = unquoted(line)
        assert words[1:6] == ["-m", "swarm_node", "join", "--max-memory", "6GB"]
        assert words[6:] == ["--name", "my node", "--identity", str(home / "swarm/state/service.identity")]
        secrets = home / "swarm/state/service.env"
        assert secrets.read_text() == 'SWARM_SECRET="hush"\n'
        assert {file.stat().st_mode & 0o777 for file in (unit, secrets)} == {0o600}
        assert calls(home)[1:4] == [
            "--user daemon-reload",
            "--user enable swarm-node",
            "--user restart swarm-node",
        ]
        assert swarm_node("service", "uninstall").returncode == 0
        assert not unit.exists()
        assert not secrets.exists()
        assert "--user disable --now swarm-node" in calls(home)

    def test_a_private_swarm_keeps_the_secret_that_was_made_up(self, home: Path) -> None:
        assert swarm_node("service", "install", "--private", "--dry-run").returncode == 0
        assert not (home / "swarm").exists()
        assert swarm_node("service", "install", "--private").returncode == 0
        unit = (home / "config/systemd/user/swarm-node.service").read_text()
        name, value = (home / "swarm/state/service.env").read_text().split("=")
        assert name == "SWARM_SECRET"
        assert len(value) > 16
        assert "--private" not in unit
        assert value.strip('"\n') not in unit

    def test_flags_are_those_of_join(self, home: Path) -> None:
        for words, sentence in (
            (["--gpux", "0"], "No such option: --gpux"),
            (["--max-memory", "lots"], "'lots' is not an amount of memory"),
            (["--gpu", "0", "--cpu"], "exclude each other"),
        ):
            done = swarm_node("service", "install", *words)
            assert done.returncode == 2
            assert sentence in done.stderr
        assert calls(home) == []

    def test_nothing_is_written_where_no_manager_runs(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAILS", "show-environment")
        done = swarm_node("service", "install")
        assert done.returncode == 2
        assert "no bus here" in done.stderr
        assert not (home / "config").exists()
        assert not (home / "swarm").exists()

    def test_status(self, home: Path) -> None:
        ours = manager.service_manager()
        assert not ours.status().installed
        with pytest.raises(UsageError, match="no service is installed"):
            ours.start()
        (unit,) = [file for file in ours.files() if file.suffix == ".service"]
        unit.parent.mkdir(parents=True)
        unit.touch()
        status = ours.status()
        assert (status.pid, status.restarts, status.memory, status.cpu_s) == (77, 2, None, 1.5)

    def test_a_failed_command_is_one_sentence(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAILS", "restart")
        with pytest.raises(ResourceError, match="restart swarm-node` failed: no bus here"):
            manager.service_manager().install(service(folders=[]))


def test_uninstall_deletes_what_is_ours_alone(home: Path) -> None:
    kept = home / "swarm/my thesis.tex"
    for file in (kept, home / "swarm/models/a.gguf", home / "swarm/state/records/b", home / "swarm/state/notes"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("text")
    dry = swarm_node("service", "uninstall", "--all", "--dry-run")
    assert dry.returncode == 0
    assert [word for word in ("models", "records", "thesis", "notes") if word in dry.stdout] == ["models", "records"]
    assert (home / "swarm/models/a.gguf").exists()
    assert swarm_node("service", "uninstall", "--all").returncode == 0
    assert sorted(path.name for path in (home / "swarm").rglob("*")) == ["my thesis.tex", "notes", "state"]
    (home / "swarm/state/notes").unlink()
    kept.unlink()
    assert swarm_node("service", "uninstall", "--all").returncode == 0
    assert not (home / "swarm").exists()


def test_sizes_of_folders(home: Path) -> None:
    folder = home / "swarm/models"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(bytes(1000))
    (folder / "b").symlink_to(folder)
    (found,) = footprint.written([])
    assert found.path == folder
    assert 1000 <= found.nbytes < 1200
