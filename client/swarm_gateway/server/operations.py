"""What an operator asks: /health, /metrics and /openapi.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from swarm.errors import SwarmError
from swarm_gateway.errors import ApiError
from swarm_gateway.http.endpoint import Endpoint, json_response
from swarm_gateway.http.openapi import openapi
from swarm_gateway.openai.errors import error_form
from swarm_gateway.serving.gateway import Gateway
from swarm_gateway.serving.served_model import ServedModel

RETRY_AFTER_S = "5"


class ModelHealth(msgspec.Struct):
    """`missing`: half-open ranges of layers that no node serves. `reason`: why it is not served, for people."""

    id: str
    served: bool
    nodes: int = 0
    missing: list[tuple[int, int]] = msgspec.field(default_factory=list)
    reason: str = ""


class Health(msgspec.Struct):
    """`ok`: every layer of every model is served."""

    status: Literal["ok", "incomplete"]
    models: list[ModelHealth]


@dataclass(frozen=True)
class Operations:
    """The handlers."""

    gateway: Gateway

    async def health(self, request: Request) -> Response:
        models = [await _health(model) for model in self.gateway.models.values()]
        if all(model.served for model in models):
            return json_response(Health("ok", models))
        return json_response(Health("incomplete", models), 503, {"retry-after": RETRY_AFTER_S})

    async def metrics(self, request: Request) -> Response:
        for name, model in self.gateway.models.items():
            model.metrics.running.labels(name).set(model.admission.running)
            model.metrics.queued.labels(name).set(model.admission.queued)
        return Response(self.gateway.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def _health(model: ServedModel) -> ModelHealth:
    try:
        snapshot = await model.client.snapshot()
    except ApiError as error:
        return ModelHealth(model.name, False, reason=error.message)
    except SwarmError as error:
        return ModelHealth(model.name, False, reason=str(error))
    missing = list(snapshot.missing())
    reason = "no node serves some layers" if missing else ""
    return ModelHealth(model.name, not missing, len(snapshot.nodes), missing, reason)


def routes(gateway: Gateway, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    """`endpoints`: all others, for the OpenAPI file."""
    operations = Operations(gateway)

    async def file(request: Request) -> Response:
        return json_response(openapi([*endpoints, *own]))

    own = [
        Endpoint(
            "GET",
            "/health",
            operations.health,
            "Is every layer served?",
            error_form,
            response=Health,
            public=True,
            others=((503, Health),),
        ),
        Endpoint("GET", "/metrics", operations.metrics, "Figures for Prometheus.", error_form),
        Endpoint("GET", "/openapi.json", file, "This API as an OpenAPI file.", error_form, public=True),
    ]
    return own
