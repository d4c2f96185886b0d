"""`/swarm` and `/swarm/events`: the swarm behind a model, for the page and whoever else wants to see it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from swarm.overview import SwarmOverview
from swarm_gateway.errors import ApiError
from swarm_gateway.http.endpoint import Endpoint, json_response
from swarm_gateway.openai.errors import error_form
from swarm_gateway.serving.gateway import Gateway
from swarm_gateway.streaming.sse import EventStream, SsePolicy, event
from swarm_gateway.swarm_view.answers import AnswerBoard
from swarm_gateway.swarm_view.watch import SwarmWatch

# A reader that is behind skips to the latest, so nothing but the frame being sent has to wait in front of it.
POLICY = SsePolicy(buffered_events=1, write_timeout_s=20.0, drains=False)


def routes(gateway: Gateway) -> list[Endpoint]:
    views = _Views(gateway)
    model = (("model", str),)
    return [
        Endpoint(
            "GET",
            "/swarm",
            views.overview,
            "The nodes behind a model, their layers and load, and the answers being written",
            error_form,
            response=SwarmOverview,
            parameters=model,
        ),
        Endpoint(
            "GET",
            "/swarm/events",
            views.events,
            "The same as it changes: the event `overview`, then `change` once a second, and `answer` at once",
            error_form,
            streams=True,
            parameters=model,
        ),
    ]


class _Views:
    """A watch for each model; it observes the answers of its model from now on."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._watches: dict[str, SwarmWatch] = {}
        for name, model in gateway.models.items():
            board = AnswerBoard()
            model.observer = board
            self._watches[name] = SwarmWatch(name, model, board)

    async def overview(self, request: Request) -> Response:
        return json_response(await self._watch(request).overview(), headers={"cache-control": "no-store"})

    async def events(self, request: Request) -> Response:
        watch = self._watch(request)
        await watch.admit()
        return EventStream(watch.events(), _failed, policy=POLICY)

    def _watch(self, request: Request) -> SwarmWatch:
        """Raises ApiError: there is no such model."""
        return self._watches[self._gateway.model(request.query_params.get("model", "")).name]


def _failed(error: ApiError) -> bytes:
    return event("error", error_form(error))
