"""/v1/models, and vLLM's /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from swarm_client import SwarmClient
from swarm_gateway.errors import ApiError
from swarm_gateway.http.body import read_json
from swarm_gateway.http.endpoint import json_response
from swarm_gateway.openai.answers import Detokenized, ModelCard, ModelList, Tokenized
from swarm_gateway.openai.messages import chat_messages, tool_definitions
from swarm_gateway.openai.requests import DetokenizeRequest, TokenizeRequest
from swarm_gateway.serving.gateway import Gateway
from swarm_gateway.serving.served_model import ServedModel


@dataclass(frozen=True)
class Models:
    """The handlers."""

    gateway: Gateway

    async def list(self, request: Request) -> Response:
        return json_response(ModelList([_card(model) for model in self.gateway.models.values()]))

    async def one(self, request: Request) -> Response:
        return json_response(_card(self.gateway.model(request.path_params["model"])))

    async def tokenize(self, request: Request) -> Response:
        body = await read_json(request, TokenizeRequest, self.gateway.config.max_body)
        client = self.gateway.model(body.model).client
        return json_response(await asyncio.to_thread(_tokenized, client, body))

    async def detokenize(self, request: Request) -> Response:
        body = await read_json(request, DetokenizeRequest, self.gateway.config.max_body)
        tokenizer = self.gateway.model(body.model).client.tokenizer
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response(Detokenized(text))


def _card(model: ServedModel) -> ModelCard:
    length = model.client.context_length if model.connected else None
    return ModelCard(id=model.name, created=model.created, max_model_len=length)


def _tokenized(client: SwarmClient, body: TokenizeRequest) -> Tokenized:
    """Raises ApiError and InvalidRequest."""
    tokenizer = client.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "invalid_request", "give either a prompt or messages", param="prompt")
    if body.messages is not None:
        ids = tokenizer.apply_chat_template(
            chat_messages(body.messages),
            body.add_generation_prompt,
            tools=[tool.to_template() for tool in tool_definitions(body.tools)] or None,
            template_options=body.chat_template_kwargs,
        )
    else:
        ids = tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in ids] if body.return_token_strs else None
    return Tokenized(len(ids), client.context_length, ids, texts)
