"""Attacks by messages about sessions: cheap to send, and answered or kept by a node."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from hostile import Siege, Victim, session_id

from swarm.errors import NetworkError
from swarm.messages import (
    AnyMessage,
    DropInFlight,
    KvFetch,
    Ping,
    ProgressQuery,
    Reroute,
    SessionOpened,
    Step,
    StepResult,
)
from swarm.net.security.identity import Identity

Run = Callable[[], Awaitable[None]]
Made = tuple[AnyMessage, bytes] | AnyMessage


def _on_all(siege: Siege, make: Callable[[Victim], Callable[[], Made]], links: int = 2, per_s: float = 2000.0) -> Run:
    return lambda: siege.all_of(
        siege.flood(node, make(node), per_s) for node in siege.target.nodes for _ in range(links)
    )


async def wrong_opens(siege: Siege) -> Run:
    """Opens of another model, of layers nobody has, and with impossible numbers."""

    def make(node: Victim) -> Callable[[], Made]:
        def one() -> Made:
            wrong = siege.rng.choice(
                ({"model": "no-such-model"}, {"start": 0, "end": 1 << 12}, {"max_tokens": 1 << 19}, {"dtype": "fp8"})
            )
            return siege.open_message(node, session_id(), **wrong)

        return one

    return _on_all(siege, make)


async def strange_dials(siege: Siege) -> Run:
    """Opens whose next hop, or source of keys and values, is a stranger: the node looks for it, and each is new."""

    def make(node: Victim) -> Callable[[], Made]:
        def one() -> Made:
            peer = Identity.generate().peer
            if node.end == siege.target.num_layers:
                return siege.open_message(node, session_id(), kv_source=peer, kv_source_tokens=64)
            return siege.open_message(node, session_id(), downstream=peer)

        return one

    return _on_all(siege, make, per_s=100)


async def kv_reservations(siege: Siege) -> Run:
    """Sessions that reserve the whole context and never send a step, of as many identities as it takes."""
    transports = [await siege.transport() for _ in range(16)]

    async def hoard(node: Victim) -> None:
        for transport in transports:
            with contextlib.suppress(NetworkError):
                stream = await siege.link(node, transport)
                for _ in range(16):
                    changes = {} if node.end == siege.target.num_layers else {"downstream": siege.target.chain[-1].peer}
                    await stream.send(siege.open_message(node, session_id(), max_tokens=8192, **changes))
                    siege.counts["reservations"] += 1
        await siege.over()

    return lambda: siege.all_of(hoard(node) for node in siege.target.nodes)


async def control_frames(siege: Siege) -> Run:
    """Pings, and questions about sessions that are none."""

    def make(node: Victim) -> Callable[[], Made]:
        number = 0

        def one() -> Made:
            nonlocal number
            number += 1
            kinds = (Ping(number), ProgressQuery(session_id()), DropInFlight(session_id(), 1, list(range(256))))
            return kinds[number % 3]

        return one

    return _on_all(siege, make)


async def kv_fetch(siege: Siege) -> Run:
    """Asks for the keys and values of sessions, with guessed ids."""
    return _on_all(siege, lambda node: lambda: KvFetch(session_id(), node.start, 0, 16, 64))


async def unsolicited(siege: Siege) -> Run:
    """Steps, results and confirmations of sessions that nobody knows, with bodies."""

    def make(node: Victim) -> Callable[[], Made]:
        number, rows = 0, 32
        body = bytes(rows * siege.target.hidden_size * siege.target.element_bytes)

        def one() -> Made:
            nonlocal number
            number += 1
            match number % 4:
                case 0:
                    return Step(session_id(), 0, number, 0, rows), body
                case 1:
                    return StepResult(session_id(), 0, number, tokens=[1] * 64)
                case 2:
                    return SessionOpened(session_id())
            return Reroute(session_id(), number, "", "")

        return one

    return _on_all(siege, make)
