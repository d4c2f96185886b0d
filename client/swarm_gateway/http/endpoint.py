"""One operation of the HTTP API: its route, its types and how its errors look. Routes and the OpenAPI file both come
from these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from swarm_gateway.errors import ApiError

Handler = Callable[[Request], Awaitable[Response]]
ErrorForm = Callable[[ApiError], Any]
"""An error as the JSON object of one API."""

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`path`: as Starlette writes it, such as `/v1/models/{model}`. `request`, `response`: types whose JSON schemas are
    published, msgspec Structs; None: no body, or none in JSON. `streams`: it can answer with server-sent events.

    `handler` may raise ApiError and SwarmError, which are answered in the form of `error_form`.
    `others`: (status, type) of answers that are no errors and have another status than 200. `public`: no key needed.
    `parameters`: (name, type) of those in the query; those in the path are texts.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    error_form: ErrorForm
    request: Any = None
    response: Any = None
    streams: bool = False
    public: bool = False
    parameters: tuple[tuple[str, Any], ...] = ()
    others: tuple[tuple[int, Any], ...] = ()


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`value`: anything that msgspec encodes."""
    return Response(_encode(value), status, headers, media_type="application/json")


def error_response(error: ApiError, form: ErrorForm, more_headers: Mapping[str, str] | None = None) -> Response:
    headers = dict(more_headers or {})
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(form(error), error.status, headers)
