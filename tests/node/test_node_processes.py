"""Real node processes on 127.0.0.1: they share a model, answer, and leave no process behind, however they end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from node_fakes import Generation, ToyClient, private_home, prompt_of
from tiny_models import hf_greedy, tiny_model

from swarm.errors import NetworkError
from swarm.messages import AnyMessage
from swarm.net.base.tls_addresses import by_peer, is_direct
from swarm.net.base.transport import Connection
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.net.security.identity import Identity
from swarm.types import ModelId

pytestmark = pytest.mark.processes
START_S = 120.0
NODE = (sys.executable, "-m", "swarm_node.commands.cli")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return private_home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    return folder


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "SWARM_HOME": str(home), "SWARM_LISTEN": "/ip4/127.0.0.1/tcp/0"}


@dataclass
class Started:
    process: subprocess.Popen[str]
    events: list[dict[str, Any]]

    def read_until(self, name: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == name:
                return self.events[-1]
        raise AssertionError(f"ended with {self.process.wait()} before '{name}': {self.events}")


@contextmanager
def started(home: Path, *arguments: str) -> Iterator[Started]:
    """A `swarm-node` command; whatever happens, nothing of it outlives the test."""
    process = subprocess.Popen([*NODE, *arguments], stdout=subprocess.PIPE, text=True, env=environment(home))
    family: list[psutil.Process] = []
    try:
        running = Started(process, [])
        yield running
        family = tree(process.pid)
    finally:
        family = family or tree(process.pid)
        for member in family:
            if member.is_running():
                member.kill()
        process.communicate(timeout=30)


def tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def all_gone(processes: list[psutil.Process], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
            return True
        time.sleep(0.05)
    return False


async def ask(address: str, nodes: list[dict[str, Any]], prompt: list[int], count: int) -> list[int]:
    """Generate along the chain of `nodes`, over a p2p daemon of our own."""
    from swarm.net.libp2p.options import HostOptions
    from swarm.net.transports.libp2p_streams import Libp2pTransport

    inbox: asyncio.Queue[tuple[str, AnyMessage, bytes]] = asyncio.Queue()

    async def on_frame(connection: Connection, message: AnyMessage, body: memoryview) -> None:
        inbox.put_nowait((connection.peer, message, bytes(body)))

    async def on_lost(connection: Connection, error: NetworkError) -> None:
        return None

    transport = await Libp2pTransport.start(Identity.generate(), HostOptions(peers=(address,)))
    try:
        async with ConnectionPool(transport, on_frame, on_lost) as pool:
            for node in nodes:
                await pool.get(node["peer"], node["addresses"])
            hops = [(node["peer"], node["start"], node["end"]) for node in nodes]
            served = ModelId("tiny", nodes[0]["weight_hash"], "fp32")
            generation = Generation(ToyClient(pool, inbox, []), b"p" * 16, prompt, hops, served)
            return await generation.generate(count)
    finally:
        await transport.close()


def test_two_processes_share_a_model_answer_and_leave(home: Path, model_dir: Path) -> None:
    local = ("local", "--nodes", "2", "--model", str(model_dir), "--dtype", "fp32", "--threads", "1", "--json")
    with started(home, *local) as running:
        ready = running.read_until("ready")
        assert len(ready["pids"]) == 2
        libp2p, direct = ([a for a in ready["peers"] if is_direct(a) == wanted] for wanted in (False, True))
        assert len(by_peer(libp2p)) == len(by_peer(direct)) == 2
        family = tree(running.process.pid)
        assert len(family) == 5  # the command, two nodes, their two p2p daemons

        shown = subprocess.run(
            [*NODE, "status", "--json"], capture_output=True, text=True, check=True, env=environment(home), timeout=60
        )
        swarm = json.loads(shown.stdout)
        assert (swarm["model"], swarm["coverage"], swarm["missing"]) == ("tiny", [1] * 6, [])

        nodes = sorted(swarm["nodes"], key=lambda node: int(node["start"]))
        prompt = prompt_of(11, 1)
        answer = asyncio.run(ask(ready["peers"][0], nodes, prompt, 6))
        assert answer == hf_greedy(tiny_model("llama"), prompt, 6)

        victim = tree(ready["pids"][1])
        victim[0].kill()
        assert all_gone(victim), "a killed node left its p2p daemon behind"
        assert running.read_until("died")["node"] == 1

        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=40) == 0
        assert all_gone(family)
        assert not (home / "state" / "local.json").exists()


def test_nodes_end_when_the_command_that_started_them_is_killed(home: Path, model_dir: Path) -> None:
    local = ("local", "--nodes", "1", "--model", str(model_dir), "--dtype", "fp32", "--threads", "1", "--json")
    with started(home, *local) as running:
        running.read_until("ready")
        family = tree(running.process.pid)
        assert len(family) == 3
        running.process.kill()
        running.process.wait()
        assert all_gone(family[1:])


def test_a_busy_port_is_one_sentence_and_exit_code_2(home: Path, model_dir: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        listen = f"/ip4/127.0.0.1/tcp/{busy.getsockname()[1]}"
        done = subprocess.run(
            [*NODE, "join", "--model", str(model_dir), "--listen", listen, "--json"],
            capture_output=True,
            text=True,
            env=environment(home),
            timeout=START_S,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"cannot listen on {listen}" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["error"] == "address_in_use"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["join", "--gpu", "0", "--cpu"], "exclude each other"),
        (["join", "--max-memory", "lots"], "not an amount of memory"),
        (["join", "--config", "/nowhere.toml"], "cannot read the config file"),
        (["local", "--nodes", "2", "--layers", "0:3"], "1 spans for 2 nodes"),
        (["local", "--nodes", "2", "--layers", "0:10,15:30"], "--layers leaves out 10:15"),
        (["local", "--model", "smollm2-135m", "--layers", "0:10,10:20"], "--layers leaves out 20:30"),
        (["status"], "no swarm on this machine"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(home: Path, arguments: list[str], sentence: str) -> None:
    done = subprocess.run(
        [*NODE, *arguments], capture_output=True, text=True, env=environment(home), timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("swarm-node: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
