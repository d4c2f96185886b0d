"""The control protocol of hivemind's p2p daemon: one socket connection a request, protobufs preceded by their length.

Owns the requests to the daemon and the errors in its replies. A connection on which a stream was opened becomes that
stream. Knows neither the daemon's process (`go_daemon`) nor frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import base58
from google.protobuf.message import DecodeError
from multiaddr import Multiaddr

from swarm.codec import DEFAULT_LIMITS, FrameLimits
from swarm.errors import ConnectionLost, NetworkError, PeerUnreachable
from swarm.net.base.frame_stream import FramedStream, varint
from swarm.net.libp2p._hivemind import p2pd_pb2 as pb
from swarm.net.libp2p.host import ProtocolNotSupported
from swarm.types import PeerId

MAX_PEER_LIST = 1 << 20  # bytes: some 10,000 connections


class GoDaemonControl:
    """A client of the daemon that listens on the unix socket `path`. All raise NetworkError if it does not run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        """-> the daemon's peer id and the addresses it can be dialled at, each ending in `/p2p/<peer id>`."""
        response = await self._request(pb.Request(type=pb.Request.IDENTIFY))
        peer = base58.b58encode(response.identify.id).decode()
        return peer, tuple(f"{Multiaddr(raw)}/p2p/{peer}" for raw in response.identify.addrs)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Ensure a connection to `peer`; malformed addresses are ignored. Raises PeerUnreachable."""
        raw = [address for text in addresses if (address := _to_bytes(text, peer))]
        try:
            await self._request(
                pb.Request(type=pb.Request.CONNECT, connect=pb.ConnectRequest(peer=_peer_bytes(peer), addrs=raw))
            )
        except DaemonError as error:
            raise PeerUnreachable(f"cannot reach {peer}: {error}") from None

    async def connected(self) -> dict[PeerId, str]:
        """The IP address at the other end of each peer's connection; "" if that is a relay."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(self.path))
            try:
                request = pb.Request(type=pb.Request.LIST_PEERS).SerializeToString()
                writer.write(varint(len(request)) + request)
                response = pb.Response.FromString(await _read_delimited(reader, MAX_PEER_LIST))
            finally:
                writer.close()
        except (OSError, EOFError, DecodeError) as error:
            raise NetworkError(f"the p2p daemon does not say who is connected: {error}") from None
        return {
            base58.b58encode(info.id).decode(): next((ip for raw in info.addrs if (ip := _ip(raw))), "")
            for info in response.peers
        }

    async def open_stream(self, peer: PeerId, protocol: str, limits: FrameLimits = DEFAULT_LIMITS) -> FramedStream:
        """A stream to a peer that we are connected to, or whose address the daemon knows. Raises PeerUnreachable."""
        opening = pb.StreamOpenRequest(peer=_peer_bytes(peer), proto=[protocol])
        try:
            response, stream = await self._open(pb.Request(type=pb.Request.STREAM_OPEN, streamOpen=opening), limits)
        except DaemonError as error:
            if "protocols not supported" in str(error):
                raise ProtocolNotSupported(f"{peer} accepts no streams of this protocol") from None
            raise PeerUnreachable(f"cannot open a stream to {peer}: {error}") from None
        stream.peer = base58.b58encode(response.streamInfo.peer).decode()
        return stream

    async def accept_streams(self, protocol: str, path: Path) -> None:
        """From now on, streams that others open are delivered to the unix socket `path`, see `accepted_peer`."""
        handler = pb.StreamHandlerRequest(addr=_unix_address(path), proto=[protocol], balanced=False)
        await self._request(pb.Request(type=pb.Request.STREAM_HANDLER, streamHandler=handler))

    async def liveness_stream(self) -> FramedStream:
        """A connection whose end is the end of the daemon."""
        _, stream = await self._open(pb.Request(type=pb.Request.PERSISTENT_CONN_UPGRADE))
        return stream

    async def _request(self, request: pb.Request) -> pb.Response:
        response, stream = await self._open(request)
        stream.abort()
        return response

    async def _open(
        self, request: pb.Request, limits: FrameLimits = DEFAULT_LIMITS
    ) -> tuple[pb.Response, FramedStream]:
        loop = asyncio.get_running_loop()
        try:
            _, stream = await loop.create_unix_connection(lambda: FramedStream(limits, preamble=True), str(self.path))
        except OSError as error:
            raise NetworkError(f"the p2p daemon does not answer: {error}") from None
        try:
            await stream.write_delimited(request.SerializeToString())
            response = pb.Response.FromString(await stream.preamble())
            if response.type != pb.Response.OK:
                raise DaemonError(response.error.msg)
        except (ConnectionLost, DecodeError) as error:
            stream.abort()
            raise NetworkError(f"the p2p daemon broke off: {error}") from None
        except BaseException:
            stream.abort()
            raise
        return response, stream


class DaemonError(NetworkError):
    """The daemon refused a request; the message is its own."""


def accepted_peer(preamble: bytes) -> PeerId:
    """The peer that opened a stream, from the preamble that the daemon sends first. Raises NetworkError."""
    try:
        return base58.b58encode(pb.StreamInfo.FromString(preamble).peer).decode()
    except DecodeError as error:
        raise NetworkError(f"the p2p daemon sent a malformed preamble: {error}") from None


def accepted_from(preamble: bytes) -> tuple[PeerId, str]:
    """As `accepted_peer`, and the IP address it came from; "" if that was a relay. Raises NetworkError."""
    return accepted_peer(preamble), _ip(pb.StreamInfo.FromString(preamble).addr)


def _ip(raw: bytes) -> str:
    """The IP address in a multiaddr; "" if it leads through a relay or is malformed."""
    try:
        parts = str(Multiaddr(raw)).split("/")
    except ValueError:
        return ""
    direct = len(parts) > 2 and parts[1] in ("ip4", "ip6") and "p2p-circuit" not in parts
    return parts[2] if direct else ""


async def _read_delimited(reader: asyncio.StreamReader, limit: int) -> bytes:
    """One message longer than a stream's preamble may be. Raises NetworkError, OSError, EOFError."""
    size = shift = 0
    while (byte := (await reader.readexactly(1))[0]) >= 0x80 and shift < 28:
        size |= (byte & 0x7F) << shift
        shift += 7
    size |= (byte & 0x7F) << shift
    if size > limit:
        raise NetworkError(f"the p2p daemon sent a message of {size} bytes")
    return await reader.readexactly(size)


def _peer_bytes(peer: PeerId) -> bytes:
    try:
        return base58.b58decode(peer)
    except ValueError:
        raise PeerUnreachable(f"'{peer}' is not a peer id") from None


def _unix_address(path: Path) -> bytes:
    """A unix multiaddr: code 400, length, path. Not by py-multiaddr, which drops the leading slash."""
    raw = str(path).encode()
    return bytes([0x90, 0x03, len(raw)]) + raw


def _to_bytes(text: str, peer: PeerId) -> bytes | None:
    """A multiaddr without the `/p2p/<peer>` at its end; None for what is none."""
    try:
        return Multiaddr(text.removesuffix(f"/p2p/{peer}")).to_bytes() or None
    except ValueError:
        return None
