"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from swarm.errors import SwarmError
from swarm_gateway.answering.plan import plan_chat
from swarm_gateway.answering.run import RunningAnswer, answer
from swarm_gateway.anthropic.answers import PING, MessageAnswer
from swarm_gateway.anthropic.errors import anthropic_error, anthropic_status
from swarm_gateway.anthropic.requests import CountTokensBody, MessagesBody, chat_request, prompt_request
from swarm_gateway.errors import ApiError
from swarm_gateway.http.body import read_json
from swarm_gateway.http.disconnect import unless_gone
from swarm_gateway.http.endpoint import Endpoint, Handler, error_response, json_response
from swarm_gateway.serving.gateway import Gateway, caller_of
from swarm_gateway.streaming.sse import EventStream, event


def routes(gateway: Gateway) -> list[Endpoint]:
    api = MessagesApi(gateway)

    def endpoint(path: str, handler: Callable[[Request, str], Awaitable[Response]], **more: Any) -> Endpoint:
        return Endpoint(
            "POST", path, _with_request_id(handler), error_form=_error_form, response=dict[str, Any], **more
        )

    return [
        endpoint("/v1/messages", api.create, summary="Create a message", request=MessagesBody, streams=True),
        endpoint("/v1/messages/count_tokens", api.count, summary="Length of a prompt", request=CountTokensBody),
    ]


@dataclass(frozen=True)
class MessagesApi:
    """The handlers."""

    gateway: Gateway

    async def create(self, request: Request, request_id: str) -> Response:
        body = await read_json(request, MessagesBody, self.gateway.config.max_body)
        model = self.gateway.model(body.model)
        chat = replace(chat_request(body), model=model.name)
        running = await unless_gone(request, answer(model, chat, caller_of(request)))
        limit = min(body.max_tokens, model.max_tokens)
        writer = MessageAnswer(model.name, limit, running.prompt_tokens, shows_thinking=body.shows_thinking)
        if body.stream:
            return EventStream(
                _frames(writer, running),
                lambda error: event("error", anthropic_error(error, request_id)),
                ping=event("ping", PING),
                headers=running.headers,
            )
        return json_response(await unless_gone(request, _whole(writer, running)))

    async def count(self, request: Request, request_id: str) -> Response:
        body = await read_json(request, CountTokensBody, self.gateway.config.max_body)
        model = self.gateway.model(body.model)
        plan = await asyncio.to_thread(plan_chat, model.client, prompt_request(body))
        return json_response({"input_tokens": len(plan.prompt)})


async def _frames(writer: MessageAnswer, running: RunningAnswer) -> AsyncGenerator[bytes, None]:
    for begun in writer.start():
        yield event(begun["type"], begun)
    async with running:
        async for _, happened in running:
            for each in writer.push(happened):
                yield event(each["type"], each)


async def _whole(writer: MessageAnswer, running: RunningAnswer) -> dict[str, Any]:
    async with running:
        async for _, happened in running:
            writer.push(happened)
    return writer.message()


def _with_request_id(handler: Callable[[Request, str], Awaitable[Response]]) -> Handler:
    """Every response, an error too, has the header `request-id`, which Anthropic's clients show."""

    async def handle(request: Request) -> Response:
        request_id = _new_request_id()
        try:
            response = await handler(request, request_id)
        except (ApiError, SwarmError) as caught:
            error = caught if isinstance(caught, ApiError) else ApiError.of(caught)
            error.status = anthropic_status(error)
            response = error_response(error, lambda e: anthropic_error(e, request_id))
        response.headers["request-id"] = request_id
        return response

    return handle


def _error_form(error: ApiError) -> dict[str, Any]:
    """Of errors before the handler, such as a wrong key."""
    return anthropic_error(error, _new_request_id())


def _new_request_id() -> str:
    return f"req_{secrets.token_hex(12)}"
