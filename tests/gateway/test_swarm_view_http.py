"""`/swarm` and `/swarm/events` over HTTP: the endpoints of a gateway application on 127.0.0.1."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from test_swarm_view import FakeSource, profile

from swarm.config import GatewayConfig
from swarm.errors import NetworkError
from swarm.types import Chain, Hop
from swarm_gateway.server.app import create_app
from swarm_gateway.server.run import http_server, listen
from swarm_gateway.serving.gateway import Gateway
from swarm_gateway.serving.served_model import ServedModel


@asynccontextmanager
async def served(gateway: Gateway) -> AsyncIterator[tuple[httpx.AsyncClient, uvicorn.Server]]:
    started = asyncio.Event()
    server = http_server(create_app(gateway), started.set)
    with listen("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        await started.wait()
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=base, timeout=10.0) as http:
            yield http, server
        server.should_exit = True
        async with asyncio.timeout(10.0):
            await serving


def gateway_of(*sources: FakeSource, **settings: Any) -> Gateway:
    models = [ServedModel(f"toy-{i}", source) for i, source in enumerate(sources)]  # type: ignore[arg-type]
    return Gateway(models, GatewayConfig(**settings))


async def next_event(lines: AsyncIterator[str]) -> tuple[str, dict[str, Any]]:
    name = ""
    async with asyncio.timeout(10.0):
        async for line in lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                return name, msgspec.json.decode(line.removeprefix("data: "))
    raise AssertionError("the stream ended")


async def test_an_overview_of_each_model() -> None:
    other = FakeSource()
    other.nodes = (profile("z", 0, 8),)
    async with served(gateway_of(FakeSource(), other)) as (http, _):
        first, named = (await http.get("/swarm")), (await http.get("/swarm", params={"model": "toy-1"}))
        assert (first.status_code, named.status_code) == (200, 200)
        assert (first.json()["model"], [n["peer"] for n in first.json()["nodes"]]) == ("toy-0", ["a", "b"])
        assert (named.json()["model"], [n["peer"] for n in named.json()["nodes"]]) == ("toy-1", ["z"])
        for path in ("/swarm", "/swarm/events"):
            unknown = await http.get(path, params={"model": "<b>" * 1000})
            assert unknown.status_code == 404
            assert unknown.json()["error"]["code"] == "model_not_found"
            assert len(unknown.content) < 1000


async def test_events_come_while_they_are_read() -> None:
    source = FakeSource()
    gateway = gateway_of(source)
    async with served(gateway) as (http, _):
        async with http.stream("GET", "/swarm/events") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.aiter_lines()
            name, overview = await next_event(lines)
            assert (name, overview["coverage"]) == ("overview", [1] * 8)
            observer = gateway.models["toy-0"].observer
            assert observer is not None
            observer.started("answer-1", "toy-0")
            observer.progressed("answer-1", chain=Chain((Hop("a", 0, 4), Hop("b", 4, 8))), tokens=1, waiting="")
            name, answer = await next_event(lines)
            assert (name, answer["state"], len(answer["chain"])) == ("answer", "writing", 2)
            source.nodes = (profile("a", 0, 8),)
            name, change = await next_event(lines)
            assert (name, change["left"], [a["id"] for a in change["answers"]]) == ("change", ["b"], ["answer-1"])
            observer.ended("answer-1")
        await asyncio.sleep(0.2)
        reads = source.reads
        await asyncio.sleep(1.2)
        assert source.reads == reads  # nobody reads any more


async def test_a_gateway_that_stops_does_not_wait_for_those_who_watch() -> None:
    async with served(gateway_of(FakeSource())) as (http, server):
        async with http.stream("GET", "/swarm/events") as response:
            lines = response.aiter_lines()
            assert (await next_event(lines))[0] == "overview"
            server.should_exit = True
            async with asyncio.timeout(5.0):
                while (event := await next_event(lines))[0] != "error":
                    pass
            assert event[1]["error"]["code"] == "stopping"


async def test_a_swarm_out_of_reach_is_an_error_and_no_stream() -> None:
    source = FakeSource()
    source.error = NetworkError("no peer answers")
    async with served(gateway_of(source)) as (http, _):
        for path in ("/swarm", "/swarm/events"):
            answer = await http.get(path)
            assert answer.status_code == 502
            assert "no peer answers" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/swarm", "/swarm/events"])
async def test_keys_and_other_origins(path: str) -> None:
    async with served(gateway_of(FakeSource(), api_keys=("secret",))) as (http, _):
        assert (await http.get(path)).status_code == 401
        other = {"origin": "https://elsewhere.example", "authorization": "Bearer secret"}
        assert (await http.get(path, headers=other)).status_code == 403
