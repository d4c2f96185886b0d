"""What an owner can do to the node on this machine, a real process: pause, status, invite, leave; its daemon dies."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from node_fakes import private_home
from test_node_processes import NODE, Started, all_gone, environment, started, tree
from tiny_models import tiny_model

from swarm.net.base.tls_addresses import is_direct

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return private_home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    return folder


def run_command(home: Path, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [*NODE, *arguments], capture_output=True, text=True, env=environment(home), timeout=180, check=False
    )
    return done.returncode, done.stdout, done.stderr


def look(home: Path) -> dict[str, Any]:
    code, out, err = run_command(home, "status", "--json")
    assert code == 0, err
    shown: dict[str, Any] = json.loads(out)
    return shown


def daemon_of(running: Started) -> psutil.Process:
    return next(p for p in tree(running.process.pid) if p.name().startswith("p2pd"))


def test_pause_status_metrics_invite_and_leave(home: Path, model_dir: Path) -> None:
    assert "no node runs" in run_command(home, "leave")[2]
    join = ("join", "--model", str(model_dir), "--dtype", "fp32", "--threads", "1", "--name", "bob", "--json")
    with started(home, *join, "--metrics-port", "0", "--max-sessions", "7") as running:
        metrics = running.read_until("metrics")
        running.read_until("serving")
        (socket,) = (home / "state" / "nodes").glob("*.sock")
        assert stat.S_IMODE(socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700

        assert run_command(home, "pause", "--node", "bob")[0] == 0
        running.read_until("paused")
        shown = look(home)
        (mine,) = shown["here"]
        assert (mine["name"], mine["paused"], mine["max_sessions"]) == ("bob", ["paused by its owner"], 7)
        assert shown["missing"] == [[0, 6]]
        assert "is called 'alice'" in run_command(home, "resume", "--node", "alice")[2]
        assert run_command(home, "resume", "--json")[0] == 0
        running.read_until("resumed")
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics['port']}/metrics", timeout=10) as page:
            text = page.read().decode()
        assert 'swarm_state{state="serving"} 1.0' in text
        assert "swarm_max_sessions 7.0" in text

        code, out, err = run_command(home, "invite", "--json")
        assert code == 0, err
        by_libp2p, by_tls = json.loads(out)["peers"]
        assert by_libp2p == mine["address"]
        assert is_direct(by_tls)
        assert by_tls.endswith(f"/p2p/{mine['peer']}")

        family = tree(running.process.pid)
        code, out, _ = run_command(home, "leave")
        assert (code, "it has left" in out) == (0, True)
        assert running.process.wait(timeout=30) == 0
        assert all_gone(family)
        assert not socket.exists()


def test_a_node_survives_its_p2p_daemon_and_ends_at_once_on_a_second_signal(home: Path, model_dir: Path) -> None:
    join = ("join", "--model", str(model_dir), "--dtype", "fp32", "--threads", "1", "--json")
    with started(home, *join) as running:
        before = running.read_until("serving")
        victim = daemon_of(running)
        victim.kill()
        assert all_gone([victim])
        for _ in range(5):  # it may not have noticed yet
            shown = look(home)  # joins by way of the node: its daemon is there again, at the same address
            (mine,) = shown["here"]
            if mine["daemon_restarts"]:
                break
        assert mine["daemon_restarts"] == 1
        assert mine["address"] == before["addresses"][0]
        assert [node["state"] for node in shown["nodes"]] == ["serving"]

        family = tree(running.process.pid)
        running.process.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=10) in (0, 130)
        assert all_gone(family, within_s=5)


def test_no_process_is_left_when_a_node_is_killed_while_it_starts(home: Path, model_dir: Path) -> None:
    join = ("join", "--model", str(model_dir), "--dtype", "fp32", "--threads", "1", "--json")
    with started(home, *join) as running:
        running.read_until("preparing")
        family: list[psutil.Process] = []
        while len(family) < 2 and running.process.poll() is None:  # until its p2p daemon is there
            family = tree(running.process.pid)
        running.process.kill()
        running.process.wait()
        assert all_gone(family, within_s=5)
