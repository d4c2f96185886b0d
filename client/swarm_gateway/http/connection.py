"""The bounds of one HTTP connection that uvicorn lacks: how many there are, and how long one may say nothing."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

from swarm_gateway.http.policy import POLICY


class BoundedProtocol(H11Protocol):
    """Without these, who opens connections and sends nothing, or a header's byte a minute, takes them all for ever."""

    _deadline: asyncio.TimerHandle | None = None  # of the next request's header

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > POLICY.max_connections:
            transport.abort()
        else:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_request()  # a part of a header; or a body whose request was refused, and nobody reads it
        else:
            self._expect_nothing()

    def _expect_request(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(POLICY.header_timeout_s, self._give_up)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        self.transport.abort()
