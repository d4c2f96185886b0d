"""Equal replicas share the clients, also those that arrive at the same moment."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from memory_swarm import cut, memory_swarm
from tiny_models import ModelTensors, tiny_model
from virtual_clock import virtual_time

from swarm.planner.routing.load_spreading import spread_load
from swarm.planner.routing.policy import POLICY
from swarm.testing.memory_network import LinkModel
from swarm.types import LayerSpan, NodeProfile, NodeState, Snapshot

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("apart_s", "most"), [(0.0, 3), (1.6, 2)])
@virtual_time
async def test_four_clients_do_not_all_take_the_same_of_two_replicas(apart_s: float, most: int) -> None:
    spans = cut(6, 3)
    async with (
        memory_swarm(ModelTensors(tiny_model("llama")), [*spans, *spans], LinkModel(delay_s=0.015)) as swarm,
        AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(swarm.client(name)) for name in range(4)]

        async def request(number: int) -> None:
            await asyncio.sleep(0.001 + apart_s * number)
            await clients[number].generate([5, 6, 7], max_new_tokens=240)

        answers = asyncio.gather(*(request(number) for number in range(4)))
        await asyncio.sleep(1.0 + 3 * apart_s)
        sessions = [node.service.sessions for node in swarm.nodes.values()]
        assert sum(sessions) == 8
        assert max(sessions) <= most
        await answers


def node(peer: str, sessions: int = 0) -> NodeProfile:
    return NodeProfile(peer, "", NodeState.SERVING, "fp32", "h", 4, LayerSpan(0, 4), (), (1.0,) * 4, sessions=sessions)


def test_load_raises_node_times_and_the_jitter_is_of_the_client_and_repeats() -> None:
    snapshot = Snapshot("m", 4, (node("a"), node("b", sessions=2)))
    seen = [spread_load(snapshot, f"client {i}") for i in range(50)]
    for view in seen:
        idle, busy = (n.layer_ms[0] for n in view.nodes)
        assert 1.0 <= idle <= 1.0 + POLICY.tie_jitter
        assert (
            2 * POLICY.load_per_session - POLICY.tie_jitter
            <= busy - idle
            <= 2 * POLICY.load_per_session + POLICY.tie_jitter
        )
    even = Snapshot("m", 4, (node("a"), node("b")))
    first = [min(spread_load(even, f"client {i}").nodes, key=lambda n: n.layer_ms).peer for i in range(50)]
    assert 10 < first.count("a") < 40
    assert spread_load(even, "client 3") == spread_load(even, "client 3")
