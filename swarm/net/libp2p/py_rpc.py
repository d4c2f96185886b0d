"""hivemind's remote calls over py-libp2p: the part of its `P2P` that `DHTNode` uses.

Owns the wire format of a call, that of hivemind's p2p daemon: one stream a call, on it a `PersistentConnectionRequest`
each way, preceded by its length. Knows neither the calls' contents nor how streams are opened (`py_host`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from swarm.errors import ConnectionLost, NetworkError, ProtocolError, SwarmError
from swarm.net.base.frame_stream import varint
from swarm.net.base.tasks import TaskSet
from swarm.net.libp2p._hivemind import P2PContext, PeerID
from swarm.net.libp2p._hivemind import p2pd_pb2 as pb
from swarm.net.libp2p.policy import PyHostPolicy
from swarm.types import PeerId

logger = logging.getLogger(__name__)

POLICY = PyHostPolicy()
MAX_MESSAGE = 4 << 20  # bytes, the limit of the Go daemon
HANDLER_ERRORS = (SwarmError, DecodeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError)
"""What hivemind's handlers raise on malformed requests."""

Handle = Callable[[Any, Any], Awaitable[Any]]


class StreamOpener(Protocol):
    """The part of `py_host.PyHost` that calls use."""

    async def open_socket(self, peer: PeerId, protocol: str) -> socket: ...

    async def accept_streams(self, protocol: str, path: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class _Handler:
    handle: Handle
    request: Any  # a protobuf class


class PyRpc:
    """A stand-in for `hivemind.P2P` in a `DHTNode`. Made by `await PyRpc.start(...)`; ended by `shutdown`."""

    def __init__(self, host: StreamOpener, own: PeerId, path: Path) -> None:
        self.peer_id = PeerID.from_base58(own)
        self._host = host
        self._path = path
        self._handlers: dict[str, _Handler] = {}
        self._server: asyncio.Server | None = None
        self._tasks = TaskSet("calls")

    @classmethod
    async def start(cls, host: StreamOpener, own: PeerId, folder: Path) -> PyRpc:
        """`folder`: for its unix socket."""
        self = cls(host, own, folder / f"calls-{os.urandom(4).hex()}")
        self._server = await asyncio.start_unix_server(self._accept, str(self._path))
        return self

    async def add_protobuf_handler(
        self,
        name: str,
        handler: Handle,
        input_protobuf_type: Any,
        *,
        stream_input: bool = False,
        stream_output: bool = False,
        balanced: bool = False,
    ) -> None:
        """See `hivemind.P2P`. Streaming calls, which a DHT does not use, raise NetworkError."""
        if stream_input or stream_output:
            raise NetworkError(f"{name} is a streaming call, which py-libp2p does not support here")
        self._handlers[name] = _Handler(handler, input_protobuf_type)
        await self._host.accept_streams(name, self._path)

    async def remove_protobuf_handler(self, name: str, **_: bool) -> None:
        self._handlers.pop(name, None)

    async def call_protobuf_handler(self, peer_id: Any, name: str, input: Any, output_protobuf_type: Any) -> Any:
        """See `hivemind.P2P`. Raises NetworkError."""
        call = pb.CallUnaryRequest(peer=peer_id.to_bytes(), proto=name, data=input.SerializeToString())
        request = pb.PersistentConnectionRequest(callId=uuid.uuid4().bytes, callUnary=call)
        async with _stream(await self._host.open_socket(peer_id.to_base58(), name)) as (reader, writer):
            await _write(writer, request)
            answer = (await _read(reader, pb.PersistentConnectionRequest)).unaryResponse
        if answer.WhichOneof("result") != "response":
            raise NetworkError(f"{peer_id} did not answer {name}: {answer.error[:200]!r}")
        try:
            return output_protobuf_type.FromString(answer.response)
        except DecodeError as error:
            raise ProtocolError(f"{peer_id} sent a malformed reply to {name}: {error}") from None

    async def shutdown(self) -> None:
        """Idempotent."""
        self._terminate()
        await self._tasks.close()

    def _terminate(self) -> None:
        """hivemind's name for an end without waiting."""
        if self._server is not None:
            self._server.close()
        self._handlers.clear()
        self._tasks.cancel()

    # Server side.

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= POLICY.max_concurrent_calls:
            writer.close()
            return
        self._tasks.start(self._serve(reader, writer), "serve")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(POLICY.call_timeout_s):
                info = await _read(reader, pb.StreamInfo)
                request = await _read(reader, pb.PersistentConnectionRequest)
            response = await self._handle(info, request.callUnary.data)
            async with asyncio.timeout(POLICY.call_timeout_s):
                await _write(writer, pb.PersistentConnectionRequest(callId=request.callId, unaryResponse=response))
        except (TimeoutError, NetworkError) as error:
            logger.debug("a call failed: %s", error)
        finally:
            writer.close()

    async def _handle(self, info: pb.StreamInfo, data: bytes) -> pb.CallUnaryResponse:
        handler = self._handlers.get(info.proto)
        if handler is None:
            return pb.CallUnaryResponse(error=b"no such call")
        context = P2PContext(handle_name=info.proto, local_id=self.peer_id, remote_id=PeerID(info.peer))
        try:
            answer = await handler.handle(handler.request.FromString(data), context)
        except HANDLER_ERRORS as error:
            logger.debug("refused a call of %s: %r", info.proto, error)
            return pb.CallUnaryResponse(error=repr(error).encode()[:200])
        return pb.CallUnaryResponse(response=answer.SerializeToString())


@contextlib.asynccontextmanager
async def _stream(near: socket) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_unix_connection(sock=near)
    try:
        yield reader, writer
    finally:
        writer.close()


async def _write(writer: asyncio.StreamWriter, message: Any) -> None:
    """Raises ConnectionLost."""
    data = message.SerializeToString()
    try:
        writer.write(varint(len(data)) + data)
        await writer.drain()
    except OSError as error:
        raise ConnectionLost(f"the call was interrupted: {error}") from None


async def _read(reader: asyncio.StreamReader, kind: Any) -> Any:
    """Raises ConnectionLost, ProtocolError."""
    try:
        size = shift = 0
        while True:
            byte = (await reader.readexactly(1))[0]
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift > 28:
                raise ProtocolError("a message without a length")
        if size > MAX_MESSAGE:
            raise ProtocolError(f"a message of {size} bytes")
        return kind.FromString(await reader.readexactly(size))
    except (OSError, asyncio.IncompleteReadError) as error:
        raise ConnectionLost(f"the call was interrupted: {error}") from None
    except DecodeError as error:
        raise ProtocolError(f"a malformed message: {error}") from None
