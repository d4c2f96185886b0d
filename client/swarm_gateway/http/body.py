"""Reading a request's JSON: size, time, depth and types are bounded before anything is built of it."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from swarm_gateway.errors import ApiError
from swarm_gateway.http.policy import POLICY

_T = TypeVar("_T")
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_BRACKETS = re.compile(rb"[\[\]{}]+")
_WHERE = re.compile(r" - at `([^`]*)`$")


async def read_json(request: Request, kind: type[_T], max_bytes: int) -> _T:
    """The body as a `kind`. Raises ApiError: 400 (`param` names the field), 408, 413, 415."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":  # a browser's form could be sent from any page without asking
        raise ApiError(415, "unsupported_media_type", "the body must be JSON: send `Content-Type: application/json`")
    return decode(await _read(request, max_bytes), kind)


def decode(body: bytes, kind: type[_T]) -> _T:
    """Raises ApiError, status 400."""
    _check_shape(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        where = _WHERE.search(text)
        sentence = text[: where.start()] if where else text
        param = where[1].removeprefix("$").removeprefix(".").split("[...]")[0] or None if where else None
        if param is None:
            missing = re.search(r"missing required field `([^`]*)`", sentence)
            param = missing[1] if missing else None
        shown = f"{param}: {sentence}" if param else sentence
        raise ApiError(400, "invalid_request", shown, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {error}") from None


def _check_shape(body: bytes) -> None:
    """Raises ApiError, status 400."""
    rest = outside_strings(body)
    if rest.count(b"[") + rest.count(b"{") > POLICY.max_containers:
        raise ApiError(400, "invalid_json", f"the body has more than {POLICY.max_containers} arrays and objects")
    if depth(rest) > POLICY.max_depth:
        raise ApiError(400, "invalid_json", f"the body is nested deeper than {POLICY.max_depth} levels")


def outside_strings(body: bytes) -> bytes:
    """A JSON text without its strings, b"" if it has few brackets; of anything else, at least what a reader gets to."""
    if body.count(b"[") + body.count(b"{") <= POLICY.max_depth:
        return b""
    return _STRINGS.sub(b"", body)


def depth(rest: bytes) -> int:
    """How deep arrays and objects are nested, by the text outside the strings."""
    deepest = now = 0
    for bracket in b"".join(_BRACKETS.findall(rest)):
        now += 1 if bracket in b"[{" else -1
        deepest = max(deepest, now)
    return deepest


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(POLICY.body_timeout_s):
            async for piece in request.stream():
                size += len(piece)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(piece)
        return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, "timeout", "the request's body did not come in time") from None
    except ClientDisconnect:
        raise ApiError(400, "invalid_json", "the connection ended inside the request's body") from None


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the body is larger than {max_bytes} bytes")
