"""A gateway over a swarm in memory, for tests: a small random model with the vocabulary of a tiny tokenizer of words.

async with gateway_swarm() as gateway:
    answer = await gateway.http.post("/v1/chat/completions", json={...})
    client = gateway.openai()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
import openai
from memory_swarm import LIMITS, MemorySwarm, cut, memory_swarm
from starlette.applications import Starlette
from tiny_models import ModelTensors, tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from swarm.config import GatewayConfig, Limits
from swarm_client import SwarmClient
from swarm_gateway.server.app import create_app
from swarm_gateway.server.run import http_server, listen
from swarm_gateway.serving.admission import Admission
from swarm_gateway.serving.gateway import Gateway
from swarm_gateway.serving.served_model import ServedModel
from swarm_kernels.tokenizer.parts import TokenizerParts
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer

MODEL = "tiny"
LAYERS = 6
CHAT_TEMPLATE = """{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}\
{% if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>")


@cache
def byte_tokenizer() -> ChatTokenizer:
    """Every byte is a token, after the special ones: no word needs training, and broken characters can be made."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    parts = TokenizerParts(tokenizer, CHAT_TEMPLATE, {"eos_token": SPECIAL[0]}, (0,))
    return ChatTokenizer(parts, (0,))


@cache
def tiny_source() -> ModelTensors:
    size = len(SPECIAL) + 256
    return ModelTensors(tiny_model("llama", vocab_size=size, max_position_embeddings=512))


@dataclass
class GatewayUnderTest:
    """`http`: a client of the gateway. `client`: what the gateway uses."""

    swarm: MemorySwarm
    client: SwarmClient
    model: ServedModel
    app: Starlette
    http: httpx.AsyncClient

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        settings: dict[str, Any] = {"api_key": "none", "max_retries": 0, **options}
        return openai.AsyncOpenAI(base_url=f"{self.http.base_url}/v1", http_client=self.http, **settings)

    def sessions(self) -> int:
        """Open on all nodes together."""
        return sum(node.service.sessions for node in self.swarm.nodes.values())

    async def until(self, holds: Callable[[], bool], within_s: float = 5.0) -> None:
        async with asyncio.timeout(within_s):
            while not holds():  # noqa: ASYNC110  what it waits for sets no event
                await asyncio.sleep(0.005)


@asynccontextmanager
async def gateway_swarm(
    *,
    borders: Sequence[int] = (2, 4),
    config: GatewayConfig | None = None,
    admission: Admission | None = None,
    headers: dict[str, str] | None = None,
    sockets: bool = False,
    limits: Limits = LIMITS,
    source: Any = None,
    tokenizer: Any = None,
    **client_config: Any,
) -> AsyncIterator[GatewayUnderTest]:
    """A swarm of one node for each span between `borders`; the model is called MODEL, and is a tiny random one if there
    is no `source` (with its `tokenizer`)."""
    source, tokenizer = source or tiny_source(), tokenizer or byte_tokenizer()
    spans = cut(source.config.num_layers, *borders)
    async with (
        memory_swarm(source, spans, limits=limits, tokenizer=tokenizer) as swarm,
        swarm.client(tokenizer=tokenizer, **{"drafter": "ngram", **client_config}) as client,
        AsyncExitStack() as stack,
    ):
        model = ServedModel(MODEL, client, admission=admission)
        app = create_app(Gateway([model], config))
        transport, url = None, "http://127.0.0.1:11435"
        if sockets:
            url = await stack.enter_async_context(served(app))
        else:
            transport = httpx.ASGITransport(app)
        http = httpx.AsyncClient(transport=transport, base_url=url, headers=headers, timeout=60)
        async with http:
            yield GatewayUnderTest(swarm, client, model, app, http)


@asynccontextmanager
async def served(app: Starlette) -> AsyncIterator[str]:
    """The application on a port of 127.0.0.1; its address."""
    listener = listen("127.0.0.1", 0)
    started = asyncio.Event()
    server = http_server(app, started.set)
    serving = asyncio.get_running_loop().create_task(server.serve([listener]))
    try:
        await started.wait()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listener.close()
