"""The HTTP application of a gateway: routes of all APIs, guard, lifespan. Owns no API and no flag."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swarm.errors import SwarmError
from swarm_gateway.anthropic.routes import routes as anthropic_routes
from swarm_gateway.errors import ApiError
from swarm_gateway.http.count import ENDPOINT, RequestCounter
from swarm_gateway.http.endpoint import Endpoint, ErrorForm, Handler, error_response
from swarm_gateway.http.guard import LOOPBACK_NAMES, Guard
from swarm_gateway.openai.errors import error_form
from swarm_gateway.openai.routes import routes as openai_routes
from swarm_gateway.pages import page_routes
from swarm_gateway.responses.routes import routes as responses_routes
from swarm_gateway.server.operations import routes as operation_routes
from swarm_gateway.serving.gateway import Gateway
from swarm_gateway.serving.served_model import Connect
from swarm_gateway.swarm_view.routes import routes as swarm_view_routes

Routes = Callable[[Gateway], Sequence[Endpoint]]

APIS: tuple[Routes, ...] = (openai_routes, responses_routes, anthropic_routes, swarm_view_routes)
"""Every API of the gateway; a further one is a line here."""

FIRST_TRY_S = 5.0  # that the first request need not be refused because the swarm is still being reached


def create_app(gateway: Gateway, connect: Mapping[str, Connect] | None = None) -> Starlette:
    """All APIs, and the page. `connect`: for models without a client, by name: how to reach their swarms, done in the
    background while the application runs.
    """
    endpoints = [endpoint for routes in APIS for endpoint in routes(gateway)]
    endpoints += operation_routes(gateway, endpoints)
    pages = page_routes()
    forms = _Forms(endpoints, [route.path for route in pages])

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for name, how in (connect or {}).items():
                tasks.create_task(gateway.models[name].keep_connected(how, stop))
            try:
                for name in connect or {}:  # all try at the same time
                    await gateway.models[name].wait_for_first_try(FIRST_TRY_S)
                yield
            finally:
                stop.set()

    async def failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError | SwarmError)
        found = error if isinstance(error, ApiError) else ApiError.of(error)
        return error_response(found, forms.of(request.url.path))

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        found = ApiError(error.status_code, code, f"{request.method} {request.url.path[:200]}: {error.detail}")
        return error_response(found, forms.of(request.url.path), error.headers)

    app = Starlette(
        routes=[*_routes(endpoints), *pages],
        middleware=_middleware(gateway, forms),
        exception_handlers={ApiError: failed, SwarmError: failed, HTTPException: refused},
        lifespan=lifespan,
    )
    app.state.draining = asyncio.Event()  # set: no new requests; streams without an end of their own end now
    app.state.stopping = asyncio.Event()  # set: streams end now
    return app


def _middleware(gateway: Gateway, forms: _Forms) -> list[Middleware]:
    config = gateway.config
    hosts = {*LOOPBACK_NAMES, _in_url(config.host), *config.allow_hosts}
    if config.host in ("0.0.0.0", "::") and config.api_keys:
        hosts.add("*")  # any of the machine's addresses; the key is what protects it

    def count(endpoint: str, status: int) -> None:
        gateway.metrics.requests.labels(endpoint, str(status)).inc()

    found = [
        Middleware(RequestCounter, on_answer=count),
        Middleware(
            Guard,
            keys=config.api_keys,
            hosts=sorted(hosts),
            origins=config.allow_origins,
            form_of=forms.of,
            is_public=forms.is_public,
        ),
    ]
    if config.allow_origins:
        found.insert(
            1,
            Middleware(
                CORSMiddleware,
                allow_origins=config.allow_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
            ),
        )
    return found


def _routes(endpoints: Sequence[Endpoint]) -> list[Route]:
    """One for each path, which knows all of its methods: `Allow` of a 405 names them."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return [Route(path, _handler(methods), methods=list(methods), name=path) for path, methods in paths.items()]


def _handler(methods: Mapping[str, Endpoint]) -> Handler:
    async def handle(request: Request) -> Response:
        endpoint = methods["GET" if request.method == "HEAD" else request.method]
        request.scope[ENDPOINT] = endpoint.path
        return await endpoint.handler(request)

    return handle


class _Forms:
    """How errors of a path look: like those of the endpoint with the longest common beginning, OpenAI's otherwise."""

    def __init__(self, endpoints: Sequence[Endpoint], public: Sequence[str]) -> None:
        forms = {endpoint.path.partition("{")[0].rstrip("/"): endpoint.error_form for endpoint in endpoints}
        self._forms = sorted(forms.items(), key=lambda item: -len(item[0]))
        self._public = {*public, *(endpoint.path for endpoint in endpoints if endpoint.public)}

    def of(self, path: str) -> ErrorForm:
        return next((form for start, form in self._forms if path == start or path.startswith(start + "/")), error_form)

    def is_public(self, path: str) -> bool:
        return path in self._public


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
