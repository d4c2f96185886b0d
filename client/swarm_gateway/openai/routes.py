"""The endpoints of OpenAI's API that are served, and vLLM's beside them."""

from __future__ import annotations

from swarm_gateway.http.endpoint import Endpoint
from swarm_gateway.openai.answers import ChatCompletion, Completion, Detokenized, ModelCard, ModelList, Tokenized
from swarm_gateway.openai.chat import ChatCompletions
from swarm_gateway.openai.completions import TextCompletions
from swarm_gateway.openai.errors import error_form
from swarm_gateway.openai.models import Models
from swarm_gateway.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from swarm_gateway.serving.gateway import Gateway


def routes(gateway: Gateway) -> list[Endpoint]:
    models = Models(gateway)
    chat, text = ChatCompletions(gateway), TextCompletions(gateway)
    return [
        Endpoint(
            "POST",
            "/v1/chat/completions",
            chat.__call__,
            "Answer a conversation.",
            error_form,
            ChatCompletionRequest,
            ChatCompletion,
            streams=True,
        ),
        Endpoint(
            "POST",
            "/v1/completions",
            text.__call__,
            "Continue a text.",
            error_form,
            CompletionRequest,
            Completion,
            streams=True,
        ),
        Endpoint("GET", "/v1/models", models.list, "The models served here.", error_form, None, ModelList),
        Endpoint("GET", "/v1/models/{model:path}", models.one, "One model.", error_form, None, ModelCard),
        Endpoint("POST", "/tokenize", models.tokenize, "Text to token ids.", error_form, TokenizeRequest, Tokenized),
        Endpoint(
            "POST", "/detokenize", models.detokenize, "Token ids to text.", error_form, DetokenizeRequest, Detokenized
        ),
    ]
