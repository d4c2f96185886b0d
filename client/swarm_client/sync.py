"""The synchronous face of SwarmClient: the same calls for programs without an event loop.

Owns one background thread that runs the loop; everything else is the async client's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from swarm.types import Snapshot
from swarm_client.api.options import ChatMessage
from swarm_client.api.results import GenerationResult, GenerationStream, TextChunk
from swarm_client.client import SwarmClient

_T = TypeVar("_T")


class SyncTextStream:
    """Iterate it for pieces; leaving the loop early and then the `with` block ends the generation on all hops."""

    def __init__(self, owner: SyncSwarmClient, stream: GenerationStream) -> None:
        self._owner = owner
        self._stream = stream

    def __iter__(self) -> Iterator[TextChunk]:
        pieces = aiter(self._stream)
        while True:
            piece = self._owner.run(_next(pieces))
            if piece is None:
                return
            yield piece

    def __enter__(self) -> SyncTextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        self._owner.run(self._stream.cancel())

    @property
    def result(self) -> GenerationResult:
        return self._stream.result


class SyncSwarmClient:
    """`with SyncSwarmClient(peers=[...]) as client: client.chat([...])`. Arguments and errors as SwarmClient's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._client = SwarmClient(*args, **kwargs)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="swarm-client", daemon=True)

    def __enter__(self) -> SyncSwarmClient:
        self._thread.start()
        try:
            self.run(self._client.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.run(self._client.__aexit__(None, None, None))
        finally:
            self._stop()

    def stream(self, prompt: str | Sequence[int], **options: Any) -> SyncTextStream:
        return SyncTextStream(self, self._client.stream(prompt, **options))

    def chat_stream(self, messages: Sequence[ChatMessage], **options: Any) -> SyncTextStream:
        return SyncTextStream(self, self._client.chat_stream(messages, **options))

    def generate(self, prompt: str | Sequence[int], **options: Any) -> GenerationResult:
        return self.run(self._client.generate(prompt, **options))

    def chat(self, messages: Sequence[ChatMessage], **options: Any) -> GenerationResult:
        return self.run(self._client.chat(messages, **options))

    def snapshot(self) -> Snapshot:
        return self.run(self._client.snapshot())

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run one coroutine on the client's loop and wait; Ctrl-C cancels it there too."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(pieces: Any) -> TextChunk | None:
    return await anext(pieces, None)
