"""A session belongs to the peers it was opened with: none of a thousand frames of others gets into it."""

from __future__ import annotations

import asyncio
import contextlib
import random

from node_fakes import LAYERS, ToyEngine, line_step, open_message, serving, toy_client
from virtual_clock import virtual_time

from swarm.errors import NetworkError
from swarm.messages import AnyMessage, CloseSession, DropInFlight, Reroute, SessionFailed, StepResult
from swarm.testing.memory_network import LinkModel, MemoryNetwork
from swarm.types import LayerSpan

SESSION = b"s" * 16
HOPS = [("node", 0, LAYERS)]
FRAMES, STRANGERS, STEPS = 1000, 250, 10


def foreign(rng: random.Random, next_step: int) -> AnyMessage:
    """What would do harm if it were believed; session, step and position are the right ones."""
    kinds: list[AnyMessage] = [
        line_step(SESSION, next_step, 2 * next_step, [3, 4]),
        DropInFlight(SESSION, next_step + 1, [0]),
        CloseSession(SESSION),
        open_message(SESSION, HOPS, 0, 0, LAYERS, 60),
        Reroute(SESSION, epoch=1, upstream="untrusted"),
        SessionFailed(SESSION, "connection_lost", "your next hop is gone", unreachable_next_hop="node"),
        StepResult(SESSION, 0, next_step, [9]),
    ]
    return rng.choice(kinds)


@virtual_time
async def test_none_of_a_thousand_foreign_frames_gets_into_a_session() -> None:
    rng = random.Random(1)
    network = MemoryNetwork(link=LinkModel(0.001))
    async with serving(network, "node", ToyEngine(LayerSpan(0, LAYERS))) as service:
        async with toy_client(network, "owner") as owner:
            await owner.open(SESSION, HOPS, max_tokens=60)
            session = service._sessions[SESSION]
            sent = 0
            for number in range(STEPS):
                for i in range(STRANGERS // STEPS):
                    async with toy_client(network, f"untrusted {number} {i}") as untrusted:
                        for _ in range(FRAMES // STRANGERS):
                            message = foreign(rng, number)
                            sent += 1
                            with contextlib.suppress(NetworkError):
                                await untrusted.send("node", message, b"")
                await asyncio.sleep(0.1)
                assert service._sessions[SESSION] is session
                assert session.client.peer == "owner"
                await owner.send("node", line_step(SESSION, number, 2 * number, [1, 2]))
                answer = await owner.message()
                assert isinstance(answer, StepResult), answer
                assert (answer.step, answer.tokens) == (number, [8])
            assert sent == FRAMES
            assert service.counters.steps == STEPS, "only its owner's steps were run"
            assert service.sessions == 1
