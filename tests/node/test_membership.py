"""Swarms of whole nodes in virtual time: they join, leave, pause and move, and every answer is the model's."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from virtual_clock import virtual_time
from virtual_nodes import LAYERS, VirtualSwarm, ask, virtual_swarm

from swarm.planner.cli.commands import COMMANDS
from swarm.planner.rebalancing.imbalance import speed
from swarm.planner.rebalancing.target import target_allocation
from swarm.testing.memory_network import MemoryDirectory
from swarm.types import NodeState, PeerId, Snapshot

PROMPT = (3, 14, 15, 92, 65, 35)


@contextlib.asynccontextmanager
async def watched(swarm: VirtualSwarm) -> AsyncIterator[list[float]]:
    """Whoever looks in the meantime finds every layer served. Yields when it was not, in seconds."""
    gaps: list[float] = []

    async def look() -> None:
        while True:
            if min(await swarm.coverage()) < 1:
                gaps.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.1)

    looking = asyncio.create_task(look())
    yield gaps
    looking.cancel()


@contextlib.asynccontextmanager
async def questions(swarm: VirtualSwarm, clients: int = 2) -> AsyncIterator[list[int]]:
    """Clients that ask one thing after another, and fail if an answer is not the model's."""
    answered = [0] * clients
    done = asyncio.Event()

    async def go_on(number: int) -> None:
        async with swarm.client(number) as client:
            while not done.is_set():
                await ask(client, (*PROMPT, number), 10)
                answered[number] += 1
                await asyncio.sleep(0.5)

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(go_on(number))
        yield answered
        done.set()


@pytest.mark.slow
@virtual_time
async def test_three_nodes_then_five_then_two_always_cover_the_model_and_finish_every_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with virtual_swarm(monkeypatch, 4, 4, 4) as swarm:
        await swarm.covered()
        await asyncio.sleep(5)
        async with watched(swarm) as gaps, questions(swarm) as answered:
            await asyncio.sleep(5)
            swarm.add(4)
            swarm.add(4)
            await asyncio.sleep(20)
            assert len((await swarm.snapshot()).serving()) == 5
            leaving = swarm.nodes[:3]
            before = list(answered)
            await asyncio.gather(*(node.end() for node in leaving))
            assert [n.peer for n in (await swarm.snapshot()).serving()] == sorted(n.peer for n in swarm.nodes[3:])
            await asyncio.sleep(5)
        assert gaps == []
        assert all(now > then for now, then in zip(answered, before, strict=True))
        for node in leaving:
            swarm.remove(node)
            assert node.reporter.names()[-1] == "stopped"


@virtual_time
async def test_the_layers_of_a_node_that_dies_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with virtual_swarm(monkeypatch, 4, 4, 4) as swarm:
        await swarm.covered()
        await asyncio.sleep(8)
        counts = await swarm.coverage()
        alone = next(n for n in (await swarm.snapshot()).serving() if n.span and counts[n.span.start] == 1)
        victim = next(node for node in swarm.nodes if node.peer == alone.peer)
        async with questions(swarm):
            await asyncio.sleep(1)
            swarm.network.kill(victim.peer)
            victim.task.cancel()
            swarm.remove(victim)
            await asyncio.sleep(1)
            await swarm.covered(60)
            await asyncio.sleep(2)
        assert "moving" in [name for node in swarm.nodes for name in node.reporter.names()]


@virtual_time
async def test_nodes_with_the_same_layers_that_leave_at_the_same_moment_do_not_count_on_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = MemoryDirectory.read

    async def slowly(self: MemoryDirectory, model: str) -> dict[PeerId, bytes]:
        """What was there when they asked."""
        found = await read(self, model)
        await asyncio.sleep(0.2)
        return found

    monkeypatch.setattr(MemoryDirectory, "read", slowly)
    async with virtual_swarm(monkeypatch, 4, 4, 4, 4) as swarm:
        await swarm.covered()
        await asyncio.sleep(8)
        assert await swarm.coverage() == [2] * LAYERS
        upper = {n.peer for n in (await swarm.snapshot()).serving() if n.span and n.span.start == 4}
        async with watched(swarm) as gaps, questions(swarm, 1):
            leaving = [node for node in swarm.nodes if node.peer in upper]
            await asyncio.gather(*(node.end() for node in leaving))
            await asyncio.sleep(2)
        assert gaps == []
        assert await swarm.coverage() == [1] * LAYERS
        for node in leaving:
            swarm.remove(node)


@pytest.mark.slow
@virtual_time
async def test_a_lopsided_swarm_evens_out_as_swarm_plan_says_beside_running_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with virtual_swarm(monkeypatch, *[4] * 8) as swarm:
        await swarm.covered()
        await asyncio.sleep(8)
        assert await swarm.coverage() == [4] * LAYERS
        upper = [n.peer for n in (await swarm.snapshot()).serving() if n.span and n.span.start == 4]
        async with watched(swarm) as gaps, questions(swarm, 1):
            for node in [node for node in swarm.nodes if node.peer in upper[1:]]:
                await node.end()
                swarm.remove(node)
            await asyncio.sleep(50)
            snapshot = await swarm.snapshot()
        assert gaps == []
        assert sorted(snapshot.coverage()) == [2] * 4 + [3] * 4
        served = sorted((n.span.start, n.span.end) for n in snapshot.serving() if n.span)
        aim = target_allocation(snapshot)
        assert served == sorted((span.start, span.end) for span in aim.spans.values())
        assert planned(snapshot) <= Counter(served)


def planned(snapshot: Snapshot) -> Counter[tuple[int, int]]:
    """The spans that `swarm-plan allocate` deals out among the nodes of a snapshot."""
    nodes = [{"id": n.peer, "layer_capacity": n.layer_capacity, "compute": speed(n)} for n in snapshot.nodes]
    request = {"num_layers": LAYERS, "nodes": nodes, "alpha": 1.0, "compute_ms": LAYERS * 0.2, "hop_ms": 5.0}
    (allocate,) = [verb for verb in COMMANDS if verb.name == "allocate"]
    replicas = allocate.run(json.dumps(request).encode()).fields["replicas"]
    return Counter((hop["start"], hop["end"]) for replica in replicas for hop in replica)


@pytest.mark.slow
@virtual_time
async def test_a_paused_node_drains_its_sessions_and_serves_again_when_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with virtual_swarm(monkeypatch, LAYERS, LAYERS) as swarm:
        await swarm.covered()
        await asyncio.sleep(6)
        assert min(await swarm.coverage()) == 2
        async with questions(swarm, 3):
            await asyncio.sleep(2)
            for node in swarm.nodes:
                availability = swarm.inside[node.peer]._availability
                availability.pause("owner", "paused by its owner")
                await asyncio.sleep(6)
                mine = (await swarm.snapshot()).node(node.peer)
                assert mine is not None
                assert (mine.state, mine.sessions) == (NodeState.DRAINING, 0)
                availability.resume("owner")
                await asyncio.sleep(3)
                assert min(await swarm.coverage()) == 2
