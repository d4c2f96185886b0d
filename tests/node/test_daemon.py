"""A node's whole life in one process, over the memory network: choosing layers, serving, draining, and mistakes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from node_fakes import Generation, private_home, prompt_of, toy_client
from tiny_models import hf_greedy, tiny_model

from swarm.config import Limits, NodeConfig
from swarm.errors import (
    ConnectionLost,
    CorruptModel,
    DeviceUnavailable,
    ModelNotFound,
    OutOfMemory,
    SwarmError,
    UsageError,
    WrongModel,
)
from swarm.net.security.identity import Identity, verify
from swarm.records import to_snapshot
from swarm.testing.memory_network import MemoryNetwork
from swarm.types import ModelId, NodeState, Snapshot
from swarm_node import node as node_module
from swarm_node.membership import span_selection
from swarm_node.membership.policy import MembershipPolicy
from swarm_node.network.connection import Connect, NodeNetwork

LIMITS = Limits(publish_interval_s=0.5, record_ttl_s=3.0, drain_timeout_s=0.5)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A home of its own, kept from test to test so that one calibration is enough."""
    monkeypatch.setenv("SWARM_HOME", str(private_home(tmp_path_factory.getbasetemp() / "home")))
    monkeypatch.setattr(span_selection, "POLICY", MembershipPolicy(stability_s=0.3))


def settings(model_dir: Path, **changes: Any) -> NodeConfig:
    return NodeConfig(**{"model": str(model_dir), "dtype": "fp32", "limits": LIMITS, "threads": 1, **changes})


class Events:
    """An EventReporter that remembers."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, Any]] = {}
        self.changed = asyncio.Event()

    def event(self, name: str, sentence: str, **fields: Any) -> None:
        self.seen[name] = fields
        self.changed.set()

    def loading(self, share: float) -> None:
        assert 0 <= share <= 1

    def fetching(self, done: int, total: int) -> None:
        assert 0 <= done <= total

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    async def wait_for(self, name: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while name not in self.seen:
                self.changed.clear()
                await self.changed.wait()
        return self.seen[name]


def over_memory(network: MemoryNetwork, identity: Identity, failed: asyncio.Event | None = None) -> Connect:
    @asynccontextmanager
    async def connect(config: NodeConfig) -> AsyncIterator[NodeNetwork]:
        transport = network.transport(identity.peer)
        try:
            directory = network.directory(identity.peer)
            yield NodeNetwork(transport, directory, identity.sign, failed or asyncio.Event())
        finally:
            await transport.close()

    return connect


class Running:
    """One node in a task."""

    def __init__(self, network: MemoryNetwork, config: NodeConfig, seed: int = 0) -> None:
        self.identity = Identity.from_seed(bytes([seed]) * 32)
        self.events = Events()
        self.stop = asyncio.Event()
        self.failed = asyncio.Event()
        connect = over_memory(network, self.identity, self.failed)
        self.task = asyncio.create_task(node_module.join(config, self.events, self.stop, connect))

    async def serving(self) -> dict[str, Any]:
        waiting = asyncio.create_task(self.events.wait_for("serving"))
        await asyncio.wait((waiting, self.task), return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            waiting.cancel()
            self.task.result()
        return await waiting

    async def end(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, 30)


@asynccontextmanager
async def running(network: MemoryNetwork, *configs: NodeConfig) -> AsyncIterator[list[Running]]:
    async with AsyncExitStack() as stack:
        nodes = []
        for seed, config in enumerate(configs):
            nodes.append(Running(network, config, seed))
            stack.push_async_callback(nodes[-1].end)
        yield nodes


async def look(network: MemoryNetwork) -> Snapshot:
    return to_snapshot(await network.directory("looker").read("tiny"), "tiny", time.time(), verify)


async def test_a_node_alone_takes_the_whole_model_and_leaves_without_a_trace(model_dir: Path) -> None:
    network = MemoryNetwork()
    config = settings(model_dir, name="solo", region="lab")
    async with running(network, config) as [node]:
        served = await node.serving()
        assert (served["start"], served["end"]) == (0, 6)
        snapshot = await look(network)
        assert snapshot.missing() == ()
        profile = snapshot.nodes[0]
        assert (profile.state, profile.name, profile.region) == (NodeState.SERVING, "solo", "lab")
        assert len(profile.layer_ms) == 6
        assert profile.kv_capacity_tokens > 0
        async with toy_client(network) as client:
            prompt = prompt_of(9, 1)
            served_as = ModelId("tiny", profile.weight_hash, "fp32")
            generation = Generation(client, b"s" * 16, prompt, [(profile.peer, 0, 6)], served_as)
            assert await generation.generate(5) == hf_greedy(tiny_model("llama"), prompt, 5)
    assert "stopped" in node.events.seen
    assert (await look(network)).nodes == ()


async def test_nodes_that_join_together_share_the_model(model_dir: Path) -> None:
    network = MemoryNetwork()
    shared = NodeConfig(
        model=str(model_dir),
        dtype="fp32",
        limits=LIMITS,
        threads=1,
        model_fraction=Fraction(1, 3),
        peers=("/memory/x/p2p/x",),
    )
    async with running(network, shared, shared, shared) as nodes:
        for node in nodes:
            await node.serving()
        snapshot = await look(network)
        assert snapshot.coverage() == [1] * 6
        assert all(len(n.span or ()) == 2 for n in snapshot.nodes)
        reasons = [node.events.seen["placed"]["reason"] for node in nodes]
        assert any("because nobody serves 0:6, shared with 2 more that join now" in reason for reason in reasons)


async def test_a_node_that_joins_later_fills_the_gap(model_dir: Path) -> None:
    network = MemoryNetwork()
    first = settings(model_dir, layers="0:4")
    async with running(network, first) as [node]:
        await node.serving()
        late = Running(network, settings(model_dir, peers=("/memory/x/p2p/x",), model_fraction=Fraction(1, 3)), 9)
        served = await late.serving()
        assert (served["start"], served["end"]) == (4, 6)
        await late.end()


async def test_a_lost_network_ends_the_node_with_a_sentence(model_dir: Path) -> None:
    network = MemoryNetwork()
    async with AsyncExitStack():
        node = Running(network, settings(model_dir))
        await node.serving()
        node.failed.set()
        with pytest.raises(ConnectionLost, match="start the node again"):
            await node.task


async def test_stopping_while_it_starts_is_no_error(model_dir: Path) -> None:
    network = MemoryNetwork()
    node = Running(network, settings(model_dir))
    await asyncio.sleep(0)
    await node.end()
    assert "serving" not in node.events.seen
    assert (await look(network)).nodes == ()


async def test_a_peer_with_other_weights_is_named(model_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "tiny"
    tiny_model("llama", seed=5).save_pretrained(other)
    network = MemoryNetwork()
    async with running(network, settings(model_dir)) as [node]:
        await node.serving()
        peer = f"/memory/x/p2p/{node.identity.peer}"
        for change in ({"model": str(other)}, {"dtype": "bf16"}):
            config = settings(model_dir, peers=(peer,), **change)
            with pytest.raises(WrongModel, match="does not serve what you ask for"):
                await Running(network, config, 7).serving()


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"model": "no-such-model"}, ModelNotFound, "is no model"),
        ({"max_memory": 1000}, OutOfMemory, "do not hold one layer"),
        ({"gpu": 99}, DeviceUnavailable, "GPU 99"),
        ({"layers": "4:2"}, UsageError, "START < END"),
        ({"layers": "0:7"}, UsageError, "the model's 6 layers"),
        ({"dtype": "int3"}, UsageError, "not a number format"),
    ],
)
async def test_configuration_errors_are_one_sentence(
    model_dir: Path, change: dict[str, Any], error: type[SwarmError], sentence: str
) -> None:
    network = MemoryNetwork()
    with pytest.raises(error, match=sentence) as caught:
        await Running(network, settings(model_dir, **change)).serving()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert (await look(network)).nodes == ()


@pytest.fixture
def broken_dir(model_dir: Path, tmp_path: Path) -> Path:
    """The model with half of its weights."""
    broken = tmp_path / "tiny"
    broken.mkdir()
    for file in model_dir.iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    return broken


async def test_a_file_cut_short_is_corrupt(broken_dir: Path) -> None:
    with pytest.raises(CorruptModel):
        await Running(MemoryNetwork(), settings(broken_dir)).serving()
