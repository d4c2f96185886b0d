"""A packet capture of a whole generation over real sockets holds no token id and no activation in clear."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from memory_swarm import MemorySwarm, NumberTokenizer
from node_fakes import prompt_of
from test_net_capture import captured, loopback  # noqa: F401  # a fixture
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import wall_clock

from swarm import codec
from swarm.messages import AnyMessage, Step, StepResult
from swarm.net.base.transport import Connection, Directory, Handler, Transport
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.identity import Identity
from swarm.net.transports.libp2p_streams import Libp2pTransport
from swarm.net.transports.tls import TlsTransport
from swarm.testing.memory_network import MemoryNetwork
from swarm.types import LayerSpan, PeerId

pytestmark = pytest.mark.processes

TOKENS = 12
SEEDS = (0, 1, 1000)  # of two nodes and a client, see `memory_swarm`


class FixedAddresses:
    """A transport with a fixed address book; addresses passed in are ignored."""

    def __init__(self, transport: Transport, addresses: dict[PeerId, Sequence[str]]) -> None:
        self._transport = transport
        self._addresses = addresses
        self.peer = transport.peer
        self.addresses = transport.addresses

    async def dial(self, peer: PeerId, addresses: Sequence[str] = ()) -> Connection:
        return await self._transport.dial(peer, self._addresses[peer])

    async def serve(self, handler: Handler) -> None:
        await self._transport.serve(handler)

    async def close(self) -> None:
        await self._transport.close()


@dataclass
class WireNetwork:
    """A `MemoryNetwork` whose frames cross real sockets; its directory stays in memory."""

    transports: dict[PeerId, FixedAddresses] = field(default_factory=dict)
    memory: MemoryNetwork = field(default_factory=lambda: MemoryNetwork(clock=wall_clock))

    def transport(self, peer: PeerId) -> FixedAddresses:
        return self.transports[peer]

    def directory(self, peer: PeerId) -> Directory:
        return self.memory.directory(peer)

    @classmethod
    async def start(cls, kind: Literal["direct", "daemon"], stack: AsyncExitStack) -> WireNetwork:
        self = cls()
        addresses: dict[PeerId, Sequence[str]] = {}
        for seed in SEEDS:
            identity = Identity.from_seed(seed.to_bytes(32, "big"))
            transport: Transport
            if kind == "direct":
                transport = await TlsTransport.start(identity, ["127.0.0.1"])
            else:
                transport = await Libp2pTransport.start(identity, HostOptions())
            stack.push_async_callback(transport.close)
            addresses[transport.peer] = transport.addresses
            self.transports[transport.peer] = FixedAddresses(transport, addresses)
        return self


@pytest.mark.parametrize("kind", ["direct", "daemon"])
async def test_a_generation_leaves_nothing_in_clear(
    kind: Literal["direct", "daemon"],
    loopback: socket.socket,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames: list[tuple[AnyMessage, bytes, bytes]] = []
    encode = codec.encode

    def recorded(message: AnyMessage, body: codec.Buffer = b"") -> tuple[bytes, codec.Buffer]:
        header, body = encode(message, body)
        frames.append((message, header, bytes(body)))
        return header, body

    monkeypatch.setattr(codec, "encode", recorded)
    prompt = prompt_of(24, 3)
    seen = b""
    async with AsyncExitStack() as stack:
        network: Any = await WireNetwork.start(kind, stack)
        source = ModelTensors(tiny_model("llama"))
        swarm = MemorySwarm(source, network, stack)
        half = source.config.num_layers // 2
        await swarm.add_node(LayerSpan(0, half))
        await swarm.add_node(LayerSpan(half, source.config.num_layers))
        async with swarm.client(tokenizer=NumberTokenizer()) as client:
            seen += captured(loopback)
            answer = await client.generate(prompt, max_new_tokens=TOKENS)
            seen += captured(loopback)
    assert list(answer.token_ids) == hf_greedy(tiny_model("llama"), prompt, TOKENS)
    steps = [frame for frame in frames if isinstance(frame[0], Step | StepResult)]
    bodies = [body for _, _, body in steps if len(body) >= 64]
    assert bodies, "activations crossed from node to node"
    assert len(seen) > sum(len(header) + len(body) for _, header, body in steps), "and are in the capture"
    for _, header, body in steps:
        assert header[8:] not in seen, "a header, which holds the token ids"
        for start in range(0, len(body) - 31, 1024):
            assert body[start : start + 32] not in seen, "a piece of an activation"
    assert bytes(prompt) not in seen
