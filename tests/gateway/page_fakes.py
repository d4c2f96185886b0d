"""A gateway for the page's tests: it streams what a test tells it to. The page cannot tell it from the real one."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from swarm_gateway.pages import page_routes

LAYERS = 30
NAMES = ("anna-desktop", "lab-07", "garage", "mac-mini", "studio", "attic", "bob", "kitchen")


def fake_node(index: int, start: int, end: int, **changes: Any) -> dict[str, Any]:
    rng = random.Random(index)
    capacity = 8192 * rng.randint(1, 6)
    node = {
        "peer": f"12D3KooW{index:04d}",
        "name": NAMES[index] if index < len(NAMES) else f"node-{index}",
        "state": "serving",
        "start": start,
        "end": end,
        "layer_ms": round(rng.uniform(0.6, 5.0), 2),
        "kv_capacity_tokens": capacity,
        "kv_free_tokens": int(capacity * rng.uniform(0.3, 0.95)),
        "sessions": rng.randint(0, 3),
        "region": rng.choice(("eu-west", "us-east", "")),
        "version": "0.17.0",
        "dtype": rng.choice(("bf16", "int8")),
        "pinned": index == 1,
        "age_s": 4.0,
        "links": {},
    }
    return {**node, **changes}


def small_swarm() -> list[dict[str, Any]]:
    spans = ((0, 10), (10, 20), (20, 30), (0, 10), (10, 20), (20, 30), (4, 16))
    nodes = [fake_node(index, *span) for index, span in enumerate(spans)]
    nodes[6]["state"] = "loading"
    for one, other in itertools.permutations(nodes, 2):
        key = sorted((one["peer"], other["peer"]))
        one["links"][other["peer"]] = round(random.Random(str(key)).uniform(3, 60), 1)
    return nodes


def large_swarm(count: int, layers: int = 64) -> list[dict[str, Any]]:
    rng = random.Random(7)
    nodes = []
    for index in range(count):
        start = rng.randrange(0, layers - 7)
        node = fake_node(index, start, start + rng.randint(4, min(12, layers - start)))
        node["links"] = {f"12D3KooW{rng.randrange(count):04d}": round(rng.uniform(1, 90), 1) for _ in range(6)}
        nodes.append(node)
    return nodes


class FakeGateway:
    """`script`: the pieces of the next answer, or an error to give; `hold`: pieces after which it waits for `go`."""

    def __init__(self, nodes: list[dict[str, Any]], layers: int = LAYERS) -> None:
        self.nodes = {node["peer"]: node for node in nodes}
        self.layers = layers
        self.watchers: set[asyncio.Queue[bytes]] = set()
        self.answers: dict[str, dict[str, Any]] = {}
        self.script: list[dict[str, Any]] = [{"content": "Hello."}]
        self.pause_s = 0.005
        self.hold: int | None = None
        self.go = asyncio.Event()
        self.requests: list[dict[str, Any]] = []
        self.cancelled = 0
        self.key = ""
        self.refusal: Response | None = None
        self.numbers = itertools.count(1)

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/swarm/events", self.events),
        ]
        return Starlette(routes=[*page_routes(), *routes])

    def overview(self) -> dict[str, Any]:
        return {"model": "smollm2-135m", "num_layers": self.layers, "nodes": list(self.nodes.values()), **self.totals()}

    def totals(self) -> dict[str, Any]:
        coverage = [0] * self.layers
        for node in self.nodes.values():
            if node["state"] == "serving" and node["start"] is not None:
                for layer in range(node["start"], node["end"]):
                    coverage[layer] += 1
        missing: list[list[int]] = []
        for layer, count in enumerate(coverage):
            if count == 0 and missing and missing[-1][1] == layer:
                missing[-1][1] = layer + 1
            elif count == 0:
                missing.append([layer, layer + 1])
        answers = list(self.answers.values())
        return {"observed_at": 1.0, "coverage": coverage, "missing": missing, "answers": answers}

    def send(self, event: str, data: dict[str, Any]) -> None:
        frame = f"event: {event}\ndata: {json.dumps(data)}\n\n".encode()
        for watcher in self.watchers:
            watcher.put_nowait(frame)

    def change(self, **what: Any) -> None:
        self.send("change", {"joined": [], "left": [], "moved": [], "updated": [], **what, **self.totals()})

    def kill(self, peer: str, instead: str, repair: str) -> None:
        """A node is gone, and every answer that went over it goes over another one at once."""
        del self.nodes[peer]
        for answer in self.answers.values():
            answer["chain"] = [
                {**hop, "peer": instead if hop["peer"] == peer else hop["peer"]} for hop in answer["chain"]
            ]
            answer["repairs"] = [*answer["repairs"], repair]
            self.send("answer", answer)
        self.change(left=[peer])

    async def models(self, request: Request) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return self.unauthorized()
        return JSONResponse({"object": "list", "data": [{"id": "smollm2-135m"}, {"id": "qwen3-8b"}]})

    def unauthorized(self) -> Response:
        return JSONResponse({"error": {"message": "This gateway needs an API key."}}, status_code=401)

    async def events(self, request: Request) -> Response:
        async def stream() -> AsyncIterator[bytes]:
            watcher: asyncio.Queue[bytes] = asyncio.Queue()
            self.watchers.add(watcher)
            try:
                yield f": ping\n\nevent: overview\ndata: {json.dumps(self.overview())}\n\n".encode()
                while True:
                    yield await watcher.get()
            finally:
                self.watchers.discard(watcher)

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def chat(self, request: Request) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return self.unauthorized()
        if self.refusal is not None:
            return self.refusal
        self.requests.append(await request.json())
        answer_id = f"answer-{next(self.numbers)}"
        headers = {"x-swarm-answer": answer_id}
        return StreamingResponse(self.answer(answer_id), headers=headers, media_type="text/event-stream")

    async def answer(self, answer_id: str) -> AsyncIterator[bytes]:
        chain = [node for node in self.nodes.values() if node["state"] == "serving"][:3]
        hops = [{"peer": node["peer"], "start": node["start"], "end": node["end"]} for node in chain]
        entry = {"id": answer_id, "model": "smollm2-135m", "chain": hops, "tokens": 0, "tokens_per_second": 0.0}
        self.answers[answer_id] = {**entry, "strategy": "speculative", "state": "writing", "repairs": []}
        self.send("answer", self.answers[answer_id])
        finished = False
        try:
            for number, delta in enumerate(self.script):
                if number == self.hold:
                    await self.go.wait()
                self.answers[answer_id].update(tokens=number + 1, tokens_per_second=21.5)
                yield self.chunk({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
                await asyncio.sleep(self.pause_s)
            yield self.chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            usage = {"prompt_tokens": 12, "completion_tokens": len(self.script), "total_tokens": 0}
            yield self.chunk({"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
            finished = True
        finally:
            self.cancelled += not finished
            del self.answers[answer_id]
            self.change()

    def chunk(self, body: dict[str, Any]) -> bytes:
        return (
            b"data: " + json.dumps({"id": "chatcmpl-1", "object": "chat.completion.chunk", **body}).encode() + b"\n\n"
        )


@asynccontextmanager
async def served(gateway: FakeGateway) -> AsyncIterator[str]:
    """Its address, while it runs in this event loop."""
    config = uvicorn.Config(
        gateway.app(),
        host="127.0.0.1",
        port=0,
        log_level="error",
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())  # `serve` would take over the signals
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event to wait for
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
