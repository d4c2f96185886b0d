"""One model behind the gateway: its name, its SwarmClient while there is one, and its queue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from swarm.errors import SwarmError
from swarm.types import Chain, Snapshot
from swarm_client import SwarmClient
from swarm_gateway.errors import ApiError
from swarm_gateway.serving.admission import Admission
from swarm_gateway.serving.metrics import GatewayMetrics

logger = logging.getLogger(__name__)
RETRY_S = (1.0, 2.0, 4.0, 8.0, 15.0)  # between attempts to reach a swarm; the last one again and again

Connect = Callable[[], AbstractAsyncContextManager[SwarmClient]]


class AnswerObserver(Protocol):
    """Told of the answers being written, for people who watch: figures and chains, never text."""

    def started(self, answer_id: str, model: str) -> None: ...

    def progressed(self, answer_id: str, *, chain: Chain | None, tokens: int, waiting: str) -> None:
        """More `tokens` came, or there is no chain now (`waiting` says why)."""
        ...

    def ended(self, answer_id: str) -> None: ...


class ServedModel:
    """`client`: a connected one (tests); or none, and `keep_connected` makes one.

    `default_max_tokens`: of an answer whose request names no limit; `max_tokens`: of any answer.
    """

    def __init__(
        self,
        name: str,
        client: SwarmClient | None = None,
        *,
        admission: Admission | None = None,
        metrics: GatewayMetrics | None = None,
        observer: AnswerObserver | None = None,
        default_max_tokens: int = 2048,
        max_tokens: int = 32768,
    ) -> None:
        self.name = name
        self.admission = admission or Admission()
        self.metrics = metrics or GatewayMetrics()
        self.observer = observer
        self.default_max_tokens = default_max_tokens
        self.max_tokens = max_tokens
        self.created = int(time.time())
        self.reason = "the swarm has not been reached yet"
        self._client = client
        self._tried = asyncio.Event()

    @property
    def connected(self) -> bool:
        return self._client is not None

    @property
    def client(self) -> SwarmClient:
        """Raises ApiError, status 503, while the swarm cannot be reached."""
        if self._client is None:
            raise ApiError(503, "no_route", f"{self.name}: {self.reason}", retry_after_s=5.0)
        return self._client

    async def keep_connected(self, connect: Connect, stop: asyncio.Event) -> None:
        """Reach the swarm, however long it takes, and stay connected until `stop` is set."""
        attempt = 0
        while not stop.is_set():
            try:
                async with connect() as client:
                    self._client = client
                    self._tried.set()
                    await stop.wait()
                    self._client = None
            except SwarmError as error:
                self._client, self.reason = None, str(error)
                self._tried.set()
                logger.warning("%s is not served: %s", self.name, error)
                await _wait(stop, RETRY_S[min(attempt, len(RETRY_S) - 1)])
                attempt += 1

    async def wait_for_first_try(self, timeout_s: float) -> None:
        """Until `keep_connected` has reached the swarm or failed once, or `timeout_s` has passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._tried.wait()

    async def snapshot(self) -> Snapshot:
        """Raises ApiError."""
        return await self.client.snapshot()


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
