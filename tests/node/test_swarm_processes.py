"""Real node processes that come and go: three, then five, then two, and every layer is served all the time."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
from memory_swarm import NumberTokenizer
from node_fakes import private_home, prompt_of
from test_node_owner import run_command
from test_node_processes import Started, started
from tiny_models import hf_greedy, tiny_model

from swarm.config import ClientConfig, Limits
from swarm.net.dht.directory import DhtDirectory
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.identity import Identity, verify
from swarm.net.transports.libp2p_streams import Libp2pTransport
from swarm.records import to_snapshot
from swarm_client import SwarmClient

pytestmark = pytest.mark.processes
GROW_S = 240.0


class Watch:
    """A client of the swarm's map, which must never show a layer that nobody serves, and one that asks all the time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peers: tuple[str, ...] = ()
        self.serving = 0
        self.answers = 0
        self.gaps: list[tuple[tuple[int, int], ...]] = []

    async def look(self, directory: DhtDirectory) -> None:
        while True:
            snapshot = to_snapshot(await directory.read("tiny"), "tiny", time.time(), verify, 6)
            self.serving = len(snapshot.serving())
            if snapshot.missing():
                self.gaps.append(snapshot.missing())
            await asyncio.sleep(0.25)

    async def ask(self) -> None:
        prompt = prompt_of(9, 3)
        truth = hf_greedy(tiny_model("llama"), prompt, 8)
        limits = Limits(route_timeout_s=30.0)  # seven processes on a busy machine: a dial may take long
        config = ClientConfig(model=str(self.folder), peers=self.peers, limits=limits)
        async with SwarmClient(config=config, tokenizer=NumberTokenizer()) as client:  # type: ignore[arg-type]
            while True:
                answer = await client.generate(prompt, max_new_tokens=8)
                assert list(answer.token_ids) == truth
                self.answers += 1
                await asyncio.sleep(0.2)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(GROW_S):
            while True:
                if self.serving == count:
                    return
                await asyncio.sleep(0.1)


def test_three_then_five_then_two(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    home = private_home(tmp_path_factory.mktemp("home"))
    folder = tmp_path / "tiny"
    tiny_model("llama").save_pretrained(folder)
    with ExitStack() as stack:
        nodes: list[Started] = []

        def join() -> None:
            arguments = [
                "join",
                "--model",
                str(folder),
                "--dtype",
                "fp32",
                "--threads",
                "1",
                "--model-fraction",
                "1/2",
                "--json",
            ]
            if nodes:
                arguments += ["--peer", nodes[0].events[-1]["addresses"][0]]
            nodes.append(stack.enter_context(started(home, *arguments, "--name", f"n{len(nodes)}")))

        join()
        nodes[0].read_until("started")
        join()
        join()
        for node in nodes:
            node.read_until("serving")

        async def scenario() -> None:
            watch = Watch(folder)
            watch.peers = tuple(node.events[-1]["addresses"][0] for node in nodes)
            async with AsyncExitStack() as open_things:
                transport = await Libp2pTransport.start(Identity.generate(), HostOptions(peers=watch.peers))
                open_things.push_async_callback(transport.close)
                directory = await DhtDirectory.start(transport, watch.peers, client=True)
                open_things.push_async_callback(directory.close)
                looking, asking = asyncio.create_task(watch.look(directory)), asyncio.create_task(watch.ask())
                try:
                    await watch.until(3)
                    join()
                    join()
                    await watch.until(5)
                    before = watch.answers
                    leaving = [asyncio.to_thread(run_command, home, "leave", "--node", f"n{i}") for i in (1, 2, 3)]
                    assert [code for code, _, _ in await asyncio.gather(*leaving)] == [0, 0, 0]
                    await watch.until(2)
                    await asyncio.sleep(2)
                finally:
                    for task in (looking, asking):
                        task.cancel()
                        await asyncio.wait([task])
                assert all(task.cancelled() for task in (looking, asking)), (looking, asking)
            assert watch.gaps == []
            assert watch.answers > before

        asyncio.run(scenario())
        for name in ("n0", "n4"):
            run_command(home, "leave", "--node", name)
        for node in nodes:
            node.read_until("stopped")
            assert_planned(node)


def assert_planned(node: Started) -> None:
    """Every choice of layers is what `swarm-plan` prints for the snapshot that the node read."""
    choices = [event for event in node.events if event["event"] in ("placed", "moving")]
    assert choices
    peer = next(event["peer"] for event in node.events if event["event"] == "started")
    for choice in choices:
        command = [sys.executable, "-m", "swarm.planner.cli.main", "place-all", "-"]
        asked = json.dumps(choice["request"])
        printed = json.loads(subprocess.run(command, input=asked, capture_output=True, text=True, check=True).stdout)
        first = printed["joiners"] if choice["event"] == "placed" else printed["waves"][0]
        mine = next(found for found in first if found["node"] == peer)
        assert mine.get("to", [mine.get("start"), mine.get("end")]) == [choice["start"], choice["end"]]
