"""Who may ask: API keys, and which web pages. Stands before every route; knows no API.

A gateway on 127.0.0.1 is reachable from every page that the user's browser shows. So a request with an `Origin` of
another host is refused, even one that needs no permission by CORS, and so is a `Host` that is not this gateway's: a
page whose own name was made to point here (DNS rebinding) has the right origin and the wrong host.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm_gateway.errors import ApiError
from swarm_gateway.http.endpoint import ErrorForm, error_response

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


class Guard:
    """`keys`: any of them opens; none: open to all that reach it. `hosts`: names (of `Host`) of this gateway.

    `origins`: allowed beside the gateway's own ("*": all). `form_of`: how errors of a path look. `is_public`: paths
    without a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        hosts: Sequence[str],
        origins: Sequence[str],
        form_of: Callable[[str], ErrorForm],
        is_public: Callable[[str], bool],
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._hosts = {host.lower() for host in hosts}
        self._origins = {origin.lower().rstrip("/") for origin in origins}
        self._form_of = form_of
        self._is_public = is_public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope, Headers(scope=scope))
            except ApiError as error:
                await error_response(error, self._form_of(scope["path"]))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = _name_of(headers.get("host", ""))
        if "*" not in self._hosts and host not in self._hosts:
            sentence = f"this gateway is not called '{host[:100]}'; allow the name with --allow-host"
            raise ApiError(403, "forbidden_host", sentence)
        origin = headers.get("origin", "").lower()
        if origin and origin not in self._origins and "*" not in self._origins and not _same(origin, headers):
            sentence = f"pages of {origin[:100]} may not use this gateway; allow them with --allow-origin"
            raise ApiError(403, "forbidden_origin", sentence)
        is_preflight = scope["method"] == "OPTIONS"  # a browser sends it without any key
        if self._keys and not is_preflight and not self._is_public(scope["path"]):
            scope["swarm_gateway.key"] = self._key(headers)

    def _key(self, headers: Headers) -> str:
        """Compares with every key, in a time that does not depend on where they differ."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        matches = [hmac.compare_digest(key, given.encode()) for key in self._keys]
        if not any(matches):
            sentence = "the API key is wrong" if given else "an API key is needed: `Authorization: Bearer KEY`"
            raise ApiError(401, "invalid_api_key", sentence)
        return f"key {matches.index(True)}"


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can reach an address to bind to."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _name_of(host: str) -> str:
    """A `Host` header without the port."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()


def _same(origin: str, headers: Headers) -> bool:
    """Whether a page is of this very host and port."""
    try:
        return urlsplit(origin).netloc == headers.get("host", "").lower()
    except ValueError:  # an unclosed bracket
        return False
