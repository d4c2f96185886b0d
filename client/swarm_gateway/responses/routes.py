"""The endpoints under `/v1/responses`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from swarm_gateway.errors import ApiError
from swarm_gateway.http.body import read_json
from swarm_gateway.http.disconnect import unless_gone
from swarm_gateway.http.endpoint import Endpoint, json_response
from swarm_gateway.http.values import invalid
from swarm_gateway.openai.errors import error_form
from swarm_gateway.responses.create import Creation
from swarm_gateway.responses.requests import ResponsesBody
from swarm_gateway.responses.store import ResponseStore, StoredResponse
from swarm_gateway.serving.gateway import Gateway, caller_of
from swarm_gateway.streaming.sse import EventStream, event

MAX_LISTED = 100


def routes(gateway: Gateway, store: ResponseStore | None = None) -> list[Endpoint]:
    api = ResponsesApi(gateway, store or ResponseStore())
    one = "/v1/responses/{response_id}"
    listing: tuple[tuple[str, Any], ...] = (("limit", int), ("order", str), ("after", str))

    def endpoint(method: str, path: str, handler: Callable[[Request], Any], summary: str, **more: Any) -> Endpoint:
        return Endpoint(method, path, handler, summary, error_form, response=dict[str, Any], **more)

    following: tuple[tuple[str, Any], ...] = (("stream", bool), ("starting_after", int))
    return [
        endpoint("POST", "/v1/responses", api.create, "Create a response", request=ResponsesBody, streams=True),
        endpoint("GET", one, api.retrieve, "A stored response", streams=True, parameters=following),
        endpoint("DELETE", one, api.delete, "Forget a response"),
        endpoint("POST", f"{one}/cancel", api.cancel, "Stop a response in the background"),
        endpoint("GET", f"{one}/input_items", api.input_items, "What it was made of", parameters=listing),
    ]


@dataclass(frozen=True)
class ResponsesApi:
    """The handlers."""

    gateway: Gateway
    store: ResponseStore
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)  # the loop itself only keeps weak references

    async def create(self, request: Request) -> Response:
        body = await read_json(request, ResponsesBody, self.gateway.config.max_body)
        begin = Creation.begin(body, self.gateway, self.store, _owner(request), caller_of(request))
        creation = await unless_gone(request, begin)
        if body.background:
            return self._in_background(creation, streamed=bool(body.stream))
        if body.stream:
            return EventStream(creation.frames(), _error_frame, headers=creation.running.headers)
        return json_response(await unless_gone(request, creation.whole()))

    async def retrieve(self, request: Request) -> Response:
        stored = self._stored(request)
        if request.query_params.get("stream", "false").lower() not in ("true", "1"):
            return json_response(stored.answer.response())
        after = _number(request, "starting_after", -1, -1, 1 << 31)
        if not stored.frames:
            raise invalid("stream", "only a response that was made in the background can be streamed again")
        return EventStream(stored.follow(after + 1), _error_frame)

    async def cancel(self, request: Request) -> Response:
        stored = self._stored(request)
        if stored.task is None:
            raise invalid("response_id", "only a response that was made in the background can be cancelled")
        await _stop(stored)
        return json_response(stored.answer.response())

    async def delete(self, request: Request) -> Response:
        stored = self.store.remove(_owner(request), request.path_params["response_id"])
        await _stop(stored)
        return json_response({"id": stored.answer.id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        stored = self._stored(request)
        limit = _number(request, "limit", 20, 1, MAX_LISTED)
        order, after = request.query_params.get("order", "desc"), request.query_params.get("after")
        if order not in ("asc", "desc"):
            raise invalid("order", "it must be asc or desc")
        items = list(stored.conversation if order == "asc" else reversed(stored.conversation))
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise invalid("after", "there is no such item")
        first = 0 if after is None else ids.index(after) + 1
        page, ids = items[first : first + limit], ids[first : first + limit]
        ends = {"first_id": ids[0] if ids else "", "last_id": ids[-1] if ids else ""}
        return json_response({"object": "list", "data": page, **ends, "has_more": len(items) > first + limit})

    def _in_background(self, creation: Creation, *, streamed: bool) -> Response:
        stored = creation.stored
        self.store.put(creation.owner, stored)  # first, as it may be refused
        stored.keep(stored.answer.queued())
        stored.task = asyncio.create_task(creation.run())
        self._tasks.add(stored.task)
        stored.task.add_done_callback(self._tasks.discard)
        if streamed:
            return EventStream(stored.follow(0), _error_frame)
        return json_response(stored.answer.response())

    def _stored(self, request: Request) -> StoredResponse:
        return self.store.get(_owner(request), request.path_params["response_id"])


async def _stop(stored: StoredResponse) -> None:
    if stored.task is not None and not stored.task.done():
        stored.task.cancel()
        await asyncio.wait([stored.task])
        if not stored.answer.done:  # it was cancelled before its first step
            stored.answer.cancel()
            stored.end()


def _owner(request: Request) -> str:
    """Without keys there is one owner: everybody who reaches the gateway."""
    return str(request.scope.get("swarm_gateway.key", ""))


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"-?[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise invalid(name, f"it must be a whole number from {least} to {most}")
    return int(text)


def _error_frame(error: ApiError) -> bytes:
    """Of what goes wrong outside an answer; an answer's own failure is among its events."""
    value = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return event("error", {**value, "sequence_number": 0})
