"""Whether others can dial us: one peer asks another to try its addresses, and to say what came of it.

    asker    -> answerer   its addresses         on a libp2p stream of PROTOCOL, MessagePack preceded by its length
    answerer -> asker      the IP address it sees the asker at, and which of the addresses at that IP it reached

Owns that exchange and its limits. Nothing is dialled but the asker's own addresses at the very IP address its request
came from, so that nobody can be made to knock on other people's doors; and few askers are served, each rarely.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from swarm.codec import UNDECODABLE
from swarm.errors import NetworkError, ProtocolError
from swarm.net.base.frame_stream import FramedStream
from swarm.net.base.tasks import TaskSet
from swarm.net.base.tls_addresses import is_direct, is_relayed, listen_ip
from swarm.net.libp2p.go_daemon_control import accepted_from
from swarm.net.libp2p.host import Libp2pHost
from swarm.types import PeerId

logger = logging.getLogger(__name__)

PROTOCOL = "/swarm/dial-back/1"
MAX_ADDRESSES = 8  # as in a record
MAX_DIALLED = 3
MAX_MESSAGE = 2048
MAX_AT_ONCE = 4
MAX_ASKERS = 1024  # whose last request is remembered
PEER_INTERVAL_S = 10.0  # between two requests of one peer
ALL_INTERVAL_S = 1.0  # between any two: peer ids cost nothing
REQUEST_S = 5.0
DIAL_S = 3.0
ANSWER_S = 15.0
_GREETING = b"\x13/multistream/1.0.0\n"  # whoever listens for libp2p answers this with the same

_Address = Annotated[str, Meta(max_length=160)]
_Addresses = Annotated[list[_Address], Meta(max_length=MAX_ADDRESSES)]


class _ProbeRequest(msgspec.Struct, frozen=True, array_like=True):
    addresses: _Addresses


class _ProbeReply(msgspec.Struct, frozen=True, array_like=True):
    observed: Annotated[str, Meta(max_length=64)]
    reached: _Addresses
    missed: _Addresses
    refusal: Annotated[str, Meta(max_length=200)] = ""


_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(_ProbeRequest).decode
_decode_reply = msgspec.msgpack.Decoder(_ProbeReply).decode

Dial = Callable[[PeerId, str], Awaitable[bool]]
"""Whether a direct address of a peer leads to that peer."""


@dataclass(frozen=True, slots=True)
class ReachabilityReport:
    """What another peer found out. `observed`: the IP address it sees us at; "" if we came by way of a relay."""

    observed: str
    reached: tuple[str, ...]
    missed: tuple[str, ...]


async def probe(host: Libp2pHost, peer: PeerId, addresses: Sequence[str]) -> ReachabilityReport:
    """Have `peer`, which we are connected to, dial our `addresses`. Raises NetworkError, with its words if any."""
    try:
        async with asyncio.timeout(ANSWER_S):
            stream = await host.control.open_stream(peer, PROTOCOL)
            try:
                await stream.write_delimited(_encode(_ProbeRequest(list(addresses[:MAX_ADDRESSES]))))
                told = _decode_reply(await stream.preamble(MAX_MESSAGE))
            finally:
                stream.abort()
    except TimeoutError:
        raise NetworkError(f"{peer} did not say within {ANSWER_S:g} s whether it can dial us") from None
    except UNDECODABLE as error:
        raise ProtocolError(f"{peer} does not make sense: {error}") from None
    if told.refusal:
        raise NetworkError(f"{peer} does not dial back: {told.refusal!r}")
    ours = set(addresses)
    return ReachabilityReport(told.observed, tuple(ours & set(told.reached)), tuple(ours & set(told.missed)))


class AutoNatServer:
    """Answers those who ask. `serve` it; close it before the host."""

    def __init__(self, host: Libp2pHost, dial: Dial, clock: Callable[[], float]) -> None:
        """`dial`: for direct addresses, whose owner it proves. `clock`: seconds."""
        self._host = host
        self._dial = dial
        self._clock = clock
        self._asked: OrderedDict[PeerId, float] = OrderedDict()
        self._last = float("-inf")
        self._server: asyncio.Server | None = None
        self._tasks = TaskSet("dial back")

    async def serve(self) -> None:
        path = self._host.inbound.with_name("dial-back")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: FramedStream(preamble=True, on_made=self._made), str(path))

        async def accept() -> None:
            await self._host.control.accept_streams(PROTOCOL, path)

        await accept()
        self._host.on_up(accept)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._tasks.close()

    def _made(self, stream: FramedStream) -> None:
        if len(self._tasks) >= MAX_AT_ONCE or self._tasks.closed:
            stream.abort()
        else:
            self._tasks.start(self._serve(stream), "answer")

    async def _serve(self, stream: FramedStream) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                peer, observed = accepted_from(await stream.preamble())
                asked = _decode_request(await stream.preamble(MAX_MESSAGE))
            await stream.write_delimited(_encode(await self._answer(peer, observed, asked.addresses)))
            await stream.close()
        except (TimeoutError, NetworkError, *UNDECODABLE) as error:
            logger.debug("a request to dial back came to nothing: %s", error)
            stream.abort()

    async def _answer(self, peer: PeerId, observed: str, addresses: Sequence[str]) -> _ProbeReply:
        now = self._clock()
        if now - self._last < ALL_INTERVAL_S or now - self._asked.get(peer, float("-inf")) < PEER_INTERVAL_S:
            return _ProbeReply("", [], [], "asked too often")
        self._last = now
        self._asked[peer] = now
        self._asked.move_to_end(peer)
        if len(self._asked) > MAX_ASKERS:
            self._asked.popitem(last=False)
        own = [a for a in dict.fromkeys(addresses) if _is_at(a, observed) and a.endswith(f"/p2p/{peer}")][:MAX_DIALLED]
        results = await asyncio.gather(*(self._reaches(peer, address) for address in own))
        found = dict(zip(own, results, strict=True))
        return _ProbeReply(observed, [a for a, ok in found.items() if ok], [a for a, ok in found.items() if not ok])

    async def _reaches(self, peer: PeerId, address: str) -> bool:
        try:
            async with asyncio.timeout(DIAL_S):
                if is_direct(address):
                    return await self._dial(peer, address)
                return await _greets(address)
        except (TimeoutError, OSError, NetworkError, asyncio.IncompleteReadError):
            return False


def _is_at(address: str, ip: str) -> bool:
    """Whether it is a TCP address at that very IP address."""
    host = listen_ip(address)
    if not ip or host is None or is_relayed(address):
        return False
    return ipaddress.ip_address(host) == ipaddress.ip_address(ip) and address.split("/")[3] == "tcp"


async def _greets(address: str) -> bool:
    """Whether libp2p listens there: a new connection, where the daemon would reuse the one we have."""
    _, _, host, _, port, *_ = address.split("/")
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
        return False
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(_GREETING)
        return await reader.readexactly(len(_GREETING)) == _GREETING
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
