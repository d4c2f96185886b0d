"""Runs the application under uvicorn until a signal: the socket, the bounds of HTTP, the clean end of open streams."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import State

from swarm.errors import AddressInUse
from swarm_gateway.http.connection import BoundedProtocol
from swarm_gateway.http.policy import POLICY


class _Server(uvicorn.Server):
    """When it stops, open streams may go on for `drain_s`; then they end with an error of their API. Those that have no
    end of their own end at once."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None], state: State) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._state = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal ends the process with code 0: uvicorn would raise it again at the end."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.draining.set()
        timer = asyncio.get_running_loop().call_later(POLICY.drain_s, self._state.stopping.set)
        await super().shutdown(sockets)
        timer.cancel()


def listen(host: str, port: int) -> socket.socket:
    """Raises AddressInUse."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise AddressInUse(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from None


def http_server(app: Starlette, on_started: Callable[[], None]) -> uvicorn.Server:
    """Its `serve([listener])` runs until SIGINT or SIGTERM; a second one does not wait for open streams."""
    # h11 and not httptools: it bounds the header.
    settings: dict[str, Any] = {"http": BoundedProtocol, "h11_max_incomplete_event_size": POLICY.max_header_bytes}
    config = uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        limit_concurrency=POLICY.max_connections,
        timeout_keep_alive=POLICY.keep_alive_s,
        timeout_graceful_shutdown=int(POLICY.drain_s) + 5,
        **settings,
    )
    return _Server(config, on_started, app.state)
