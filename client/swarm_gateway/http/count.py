"""Counts answered requests by endpoint and status. Stands before everything, so that refusals count too."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

ENDPOINT = "swarm_gateway.endpoint"
"""Key of the scope: the path of the endpoint as its route writes it, never as a stranger does."""


class RequestCounter:
    """`on_answer`: called with (endpoint or "other", status) when an answer begins."""

    def __init__(self, app: ASGIApp, *, on_answer: Callable[[str, int], None]) -> None:
        self._app = app
        self._on_answer = on_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._on_answer(scope.get(ENDPOINT, "other"), message["status"])
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)
