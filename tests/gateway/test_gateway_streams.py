"""Streams over real sockets: what arrives when, who is told what, and what ends when nobody reads."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest
from gateway_swarm import MODEL, GatewayUnderTest, gateway_swarm, served
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swarm.config import Limits
from swarm_gateway.errors import ApiError
from swarm_gateway.openai.errors import error_form
from swarm_gateway.serving.admission import Admission, AdmissionPolicy
from swarm_gateway.streaming.sse import EventStream, SsePolicy, data

LONG: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
    "max_tokens": 450,
    "ignore_eos": True,
}
CHAT = "/v1/chat/completions"


async def first_lines(lines: AsyncIterator[str], count: int) -> list[str]:
    """The first ones that are not empty."""
    found: list[str] = []
    while len(found) < count:
        line = await anext(lines)
        found += [line] if line else []
    return found


async def test_a_closed_stream_frees_every_hop() -> None:
    async with gateway_swarm(sockets=True) as gateway:
        for n in (1, 3):
            async with gateway.http.stream("POST", CHAT, json={**LONG, "stream": True, "n": n}) as response:
                assert response.headers["x-accel-buffering"] == "no"
                assert response.headers["content-type"].startswith("text/event-stream")
                lines = await first_lines(response.aiter_lines(), 4)
                assert all(line.startswith("data: {") for line in lines)
                assert gateway.sessions() > 0
            began = time.perf_counter()
            await gateway.until(lambda: gateway.sessions() == 0)
            assert time.perf_counter() - began < 1.0
            assert gateway.model.admission.running == 0


async def test_a_caller_who_hangs_up_before_the_whole_answer_frees_every_hop() -> None:
    async with gateway_swarm(sockets=True) as gateway:
        asking = asyncio.ensure_future(gateway.http.post(CHAT, json=LONG))
        await gateway.until(lambda: gateway.sessions() == 3)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await gateway.until(lambda: gateway.sessions() == 0)
        assert gateway.model.admission.running == 0


async def test_a_full_gateway_says_when_to_come_back() -> None:
    admission = Admission(AdmissionPolicy(max_running=1, max_queued=1, timeout_s=1.0))
    short = {**LONG, "max_tokens": 2}
    async with gateway_swarm(sockets=True, admission=admission) as gateway:
        async with admission.turn("another caller"):
            queued = asyncio.ensure_future(gateway.http.post(CHAT, json=short))
            await gateway.until(lambda: admission.queued == 1)
            refused = await gateway.http.post(CHAT, json={**short, "stream": True})
            late = await queued
        for answer in (refused, late):  # no room in the queue; no turn in time
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "rate_limited"
        assert gateway.sessions() == 0
        assert (await gateway.http.post(CHAT, json=short)).status_code == 200


async def test_full_nodes_are_a_wait_and_no_error() -> None:
    """One session a peer at each node: of three requests that run at once, two find the nodes full."""
    limits = Limits(route_timeout_s=0.3, max_sessions_per_peer=1)
    async with gateway_swarm(sockets=True, limits=limits) as gateway:
        asking = [gateway.http.post(CHAT, json={**LONG, "max_tokens": 20}) for _ in range(3)]
        answers = await asyncio.gather(*asking)
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1


async def test_full_nodes_are_tried_no_longer_than_a_turn_is_waited_for() -> None:
    limits = Limits(route_timeout_s=0.3, max_sessions_per_peer=1, turn_timeout_s=0.5)
    admission = Admission(AdmissionPolicy(timeout_s=0.5))
    async with gateway_swarm(sockets=True, limits=limits, admission=admission) as gateway:
        async with gateway.client.stream([7, 8, 9], max_new_tokens=400, ignore_eos=True) as stream:
            await anext(aiter(stream))  # it holds its sessions until it is read on
            refused = await gateway.http.post(CHAT, json={**LONG, "max_tokens": 2})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1


async def test_an_error_inside_a_stream_is_its_last_event() -> None:
    limits = Limits(route_timeout_s=0.3, repair_timeout_s=0.3)
    async with gateway_swarm(sockets=True, limits=limits) as gateway:
        async with gateway.http.stream("POST", CHAT, json={**LONG, "stream": True}) as response:
            coming = response.aiter_lines()
            lines = await first_lines(coming, 3)
            gateway.swarm.kill(gateway.swarm.peers[1])
            rest = [line async for line in coming if line]
        assert lines[0].startswith("data: {")
        assert '"error"' in rest[-1]
        assert rest[-1].startswith('data: {"error":{"message":')
        assert "data: [DONE]" not in rest
        await gateway.until(lambda: gateway.model.admission.running == 0)


async def test_a_node_that_dies_is_a_pause() -> None:
    async with gateway_swarm(sockets=True) as gateway:
        await add_replicas(gateway)
        ask = {**LONG, "max_tokens": 100}
        whole = (await gateway.http.post(CHAT, json=ask)).json()["choices"][0]["message"]["content"]
        text = ""
        async with gateway.http.stream("POST", CHAT, json={**ask, "stream": True}) as response:
            killed = False
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                if len(text) > 20 and not killed:
                    killed = True
                    gateway.swarm.kill(gateway.swarm.peers[1])
        assert text == whole


async def add_replicas(gateway: GatewayUnderTest) -> None:
    """One more node for each span."""
    for node in list(gateway.swarm.nodes.values()):
        await gateway.swarm.add_node(node.span)


def served_frames(frames: AsyncGenerator[bytes, None], policy: SsePolicy) -> Starlette:
    async def handle(request: Request) -> Response:
        return EventStream(frames, lambda error: data(error_form(error)), policy=policy)

    app = Starlette(routes=[Route("/", handle)])
    app.state.stopping = asyncio.Event()
    app.state.draining = asyncio.Event()
    return app


async def test_pings_while_nothing_comes() -> None:
    async def slow() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.25)
        yield data(1)

    app = served_frames(slow(), SsePolicy(ping_interval_s=0.1))
    async with served(app) as url, httpx.AsyncClient() as http:
        text = (await http.get(url)).text
    assert text == ": ping\n\n: ping\n\ndata: 1\n\n"


async def test_a_slow_reader_slows_the_work_only_behind_a_buffer() -> None:
    made = 0
    closed = asyncio.Event()

    async def fast() -> AsyncGenerator[bytes, None]:
        nonlocal made
        try:
            while True:
                made += 1
                yield data("x" * 100_000)
        finally:
            closed.set()

    app = served_frames(fast(), SsePolicy(buffered_events=4))
    async with served(app) as url, httpx.AsyncClient() as http, http.stream("GET", url) as response:
        await first_lines(response.aiter_lines(), 1)
        await asyncio.sleep(0.3)
        before = made
        await asyncio.sleep(0.3)
        assert made == before  # it waits for the reader
        assert made < 200
    await asyncio.wait_for(closed.wait(), 2)


async def test_a_reader_that_takes_nothing_is_left() -> None:
    closed = asyncio.Event()

    async def fast() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield data("x" * 100_000)
        finally:
            closed.set()

    app = served_frames(fast(), SsePolicy(buffered_events=4, write_timeout_s=0.3))
    async with served(app) as url, httpx.AsyncClient() as http, http.stream("GET", url) as response:
        await first_lines(response.aiter_lines(), 1)
        await asyncio.wait_for(closed.wait(), 5)


async def test_an_api_error_of_a_stream_is_in_the_api_s_form() -> None:
    async def failing() -> AsyncGenerator[bytes, None]:
        yield data(1)
        raise ApiError(429, "rate_limited", "full")

    app = served_frames(failing(), SsePolicy())
    async with served(app) as url, httpx.AsyncClient() as http:
        lines = (await http.get(url)).text.split("\n\n")
    assert lines[0] == "data: 1"
    assert lines[1].startswith('data: {"error":{"message":"full","type":"rate_limit_error"')


async def test_open_streams_end_with_an_error_when_the_gateway_stops() -> None:
    async with gateway_swarm(sockets=True) as gateway:
        async with gateway.http.stream("POST", CHAT, json={**LONG, "stream": True}) as response:
            coming = response.aiter_lines()
            await first_lines(coming, 2)
            gateway.app.state.stopping.set()
            rest = [line async for line in coming if line]
        assert rest[-1].startswith('data: {"error":')
        assert "stopping" in rest[-1]
        await gateway.until(lambda: gateway.sessions() == 0)
