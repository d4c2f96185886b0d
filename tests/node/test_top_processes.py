"""`swarm-node top` on a swarm of real processes: printed once, as JSON, and live on a terminal of its own."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from node_fakes import private_home
from test_node_owner import run_command
from test_node_processes import NODE, all_gone, environment, started, tree
from tiny_models import tiny_model
from tokenizers import Tokenizer, models

pytestmark = pytest.mark.processes
WITHIN_S = 60.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """The other end of a pseudo terminal."""

    def __init__(self, side: int) -> None:
        self.side = side

    def press(self, keys: bytes) -> None:
        os.write(self.side, keys)

    def wait_for(self, text: str) -> None:
        """Until `text` is drawn after what was waited for last, wherever its line is broken."""
        deadline, drawn = time.monotonic() + WITHIN_S, ""
        while text not in (shown := " ".join(ESCAPES.sub("", drawn).split())):
            assert time.monotonic() < deadline, f"no '{text}' in ...{shown[-1000:]}"
            drawn += os.read(self.side, 1 << 16).decode(errors="replace")


@contextmanager
def on_a_terminal(home: Path, *arguments: str, width: int) -> Iterator[tuple[subprocess.Popen[bytes], Terminal]]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
    env = {**environment(home), "TERM": "xterm-256color", "COLUMNS": str(width), "LINES": "30"}
    process = subprocess.Popen([*NODE, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    try:
        yield process, Terminal(ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_top_of_a_local_swarm(tmp_path: Path) -> None:
    home, model = private_home(tmp_path / "home"), tmp_path / "tiny"
    tiny_model("llama").save_pretrained(model)
    local = ("local", "--layers", "0:3,3:6", "--model", str(model), "--dtype", "fp32", "--threads", "1", "--json")
    with started(home, *local) as running:
        pids = running.read_until("ready")["pids"]

        code, out, err = run_command(home, "top")  # no terminal: as with --once
        assert code == 0, err
        assert "tiny, 6 layers: 2 nodes serve, 0 sessions. Every layer is served by 1 or more." in out
        assert "On this machine" in out
        assert re.search(r"local-0 +0:3 ", out)
        assert re.search(r"local-1 +3:6 ", out)

        code, out, err = run_command(home, "top", "--json")
        assert code == 0, err
        overview = json.loads(out)
        assert (overview["model"], overview["coverage"], overview["missing"]) == ("tiny", [1] * 6, [])
        assert sorted((n["name"], n["start"], n["end"]) for n in overview["nodes"]) == [
            ("local-0", 0, 3),
            ("local-1", 3, 6),
        ]

        with on_a_terminal(home, "top", width=60) as (process, terminal):
            terminal.wait_for("Every layer is served by 1 or more")
            terminal.press(b"s")
            terminal.wait_for("sort: name")
            os.kill(pids[1], signal.SIGTERM)
            terminal.wait_for("Nobody serves layers 3:6")
            terminal.wait_for("local-1 left")
            terminal.press(b"q")
            assert process.wait(timeout=20) == 0


def test_a_gateway_beside_a_local_swarm(tmp_path: Path) -> None:
    home, model = private_home(tmp_path / "home"), tmp_path / "tiny"
    tiny_model("llama").save_pretrained(model)
    save_tokenizer(model)
    local = ("local", "--layers", "0:3,3:6", "--model", str(model), "--dtype", "fp32", "--threads", "1", "--json")
    with started(home, *local, "--gateway-port", "0") as running:
        running.read_until("ready")
        gateway = running.read_until("gateway")
        family = tree(running.process.pid)
        deadline = time.monotonic() + WITHIN_S
        while "error" in (overview := swarm_of(gateway["address"])):  # it reaches the swarm after it listens
            assert time.monotonic() < deadline, overview
            time.sleep(0.2)
        assert (overview["num_layers"], overview["coverage"]) == (6, [1] * 6)
        assert [node["name"] for node in sorted(overview["nodes"], key=lambda n: int(n["start"]))] == [
            "local-0",
            "local-1",
        ]
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=60) == 0
        assert all_gone(family)


def save_tokenizer(folder: Path) -> None:
    """One of words, for a tiny model; without any, no gateway can serve it."""
    count = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w1"}))


def swarm_of(address: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{address}/swarm", timeout=10) as reply:
            shown: dict[str, Any] = json.load(reply)
    except urllib.error.HTTPError as error:
        shown = json.load(error)
    return shown
