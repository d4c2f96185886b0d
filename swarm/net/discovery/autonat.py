"""AutoNAT: whether others can dial us. A client has a server dial its addresses and report which it reached.

    client -> server   its addresses         on a libp2p stream of PROTOCOL, MessagePack preceded by its length
    server -> client   the client's observed IP address, and which of the addresses at that IP it reached

Owns that exchange and its limits. The server dials nothing but the client's own addresses at the IP address that the
request came from, so that it cannot be used for attacks on third parties; and requests are rate limited.
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

from swarm.errors import UNDECODABLE, NetworkError, ProtocolError
from swarm.net.base.frame_stream import FramedStream
from swarm.net.base.tasks import TaskSet
from swarm.net.base.tls_addresses import is_direct, is_relayed, listen_ip
from swarm.net.libp2p.go_daemon_control import accepted_from
from swarm.net.libp2p.host import Libp2pHost
from swarm.types import PeerId

logger = logging.getLogger(__name__)

PROTOCOL = "/swarm/dial-back/1"
MAX_ADDRESSES = 8  # as in a record
MAX_MESSAGE = 2048  # bytes
_MULTISTREAM = b"\x13/multistream/1.0.0\n"  # a libp2p listener replies to this with the same


@dataclass(frozen=True, slots=True)
class AutoNatPolicy:
    """Limits of the service, which dials on behalf of untrusted peers. Times in seconds."""

    max_dials: int = 3  # addresses of one request
    max_concurrent_requests: int = 4
    max_tracked_clients: int = 1024  # whose last request is remembered: memory against repeated requests
    client_interval_s: float = 10.0  # between two requests of one peer
    request_interval_s: float = 1.0  # between any two, as peer ids are free to make
    request_timeout_s: float = 5.0  # for a request to arrive whole
    dial_timeout_s: float = 3.0  # for one address
    reply_timeout_s: float = 15.0  # of the client, for all of it


POLICY = AutoNatPolicy()

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
    """The result of another peer's dials. `observed`: our IP address as it sees it; "" through a relay."""

    observed: str
    reached: tuple[str, ...]
    missed: tuple[str, ...]


async def probe(host: Libp2pHost, peer: PeerId, addresses: Sequence[str]) -> ReachabilityReport:
    """Have `peer`, which we are connected to, dial our `addresses`. Raises NetworkError, with its refusal if any."""
    try:
        async with asyncio.timeout(POLICY.reply_timeout_s):
            stream = await host.control.open_stream(peer, PROTOCOL)
            try:
                await stream.write_delimited(_encode(_ProbeRequest(list(addresses[:MAX_ADDRESSES]))))
                reply = _decode_reply(await stream.preamble(MAX_MESSAGE))
            finally:
                stream.abort()
    except TimeoutError:
        raise NetworkError(
            f"{peer} did not report within {POLICY.reply_timeout_s:g} s whether it can dial us"
        ) from None
    except UNDECODABLE as error:
        raise ProtocolError(f"{peer} sent a malformed reply: {error}") from None
    if reply.refusal:
        raise NetworkError(f"{peer} does not dial back: {reply.refusal!r}")
    ours = set(addresses)
    return ReachabilityReport(reply.observed, tuple(ours & set(reply.reached)), tuple(ours & set(reply.missed)))


class AutoNatServer:
    """Serves the requests of others. `serve` it; close it before the host."""

    def __init__(self, host: Libp2pHost, dial: Dial, clock: Callable[[], float]) -> None:
        """`dial`: for direct addresses, whose owner it authenticates. `clock`: seconds."""
        self._host = host
        self._dial = dial
        self._clock = clock
        self._last_by_client: OrderedDict[PeerId, float] = OrderedDict()  # time of the last request
        self._last = float("-inf")
        self._server: asyncio.Server | None = None
        self._tasks = TaskSet("autonat")

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
        if len(self._tasks) >= POLICY.max_concurrent_requests or self._tasks.closed:
            stream.abort()
        else:
            self._tasks.start(self._serve(stream), "request")

    async def _serve(self, stream: FramedStream) -> None:
        try:
            async with asyncio.timeout(POLICY.request_timeout_s):
                peer, observed = accepted_from(await stream.preamble())
                request = _decode_request(await stream.preamble(MAX_MESSAGE))
            await stream.write_delimited(_encode(await self._reply(peer, observed, request.addresses)))
            await stream.close()
        except (TimeoutError, NetworkError, *UNDECODABLE) as error:
            logger.debug("an autonat request failed: %s", error)
            stream.abort()

    async def _reply(self, peer: PeerId, observed: str, addresses: Sequence[str]) -> _ProbeReply:
        now = self._clock()
        last = self._last_by_client.get(peer, float("-inf"))
        if now - self._last < POLICY.request_interval_s or now - last < POLICY.client_interval_s:
            return _ProbeReply("", [], [], "asked too often")
        self._last = now
        self._last_by_client[peer] = now
        self._last_by_client.move_to_end(peer)
        if len(self._last_by_client) > POLICY.max_tracked_clients:
            self._last_by_client.popitem(last=False)
        own = [a for a in dict.fromkeys(addresses) if _is_at(a, observed) and a.endswith(f"/p2p/{peer}")]
        own = own[: POLICY.max_dials]
        results = await asyncio.gather(*(self._is_reachable(peer, address) for address in own))
        found = dict(zip(own, results, strict=True))
        return _ProbeReply(observed, [a for a, ok in found.items() if ok], [a for a, ok in found.items() if not ok])

    async def _is_reachable(self, peer: PeerId, address: str) -> bool:
        try:
            async with asyncio.timeout(POLICY.dial_timeout_s):
                if is_direct(address):
                    return await self._dial(peer, address)
                return await _speaks_libp2p(address)
        except (TimeoutError, OSError, NetworkError, asyncio.IncompleteReadError):
            return False


def _is_at(address: str, ip: str) -> bool:
    """Whether it is a TCP address at exactly that IP address."""
    host = listen_ip(address)
    if not ip or host is None or is_relayed(address):
        return False
    return ipaddress.ip_address(host) == ipaddress.ip_address(ip) and address.split("/")[3] == "tcp"


async def _speaks_libp2p(address: str) -> bool:
    """Whether libp2p listens there: by a new connection, where the host would reuse an open one."""
    _, _, host, _, port, *_ = address.split("/")
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
        return False
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(_MULTISTREAM)
        return await reader.readexactly(len(_MULTISTREAM)) == _MULTISTREAM
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
