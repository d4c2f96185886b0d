"""What a chat request becomes for SwarmClient: prompt, options, and how the answer is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swarm_client import SwarmClient
from swarm_client.api.options import check_messages
from swarm_gateway.chat.events import ChatRequest, OutputParser
from swarm_gateway.tools.grammar import answer_grammar
from swarm_gateway.tools.prompt import template_input
from swarm_gateway.tools.select import call_format, keeps_control_tokens, parser_for
from swarm_gateway.tools.validate import check_tools


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """`prompt`: token ids. `options`: keyword arguments of `SwarmClient.stream`. `make_parser`: for one choice."""

    prompt: list[int]
    options: Mapping[str, Any]
    make_parser: Callable[[], OutputParser]


def plan_chat(client: SwarmClient, request: ChatRequest) -> AnswerPlan:
    """Raises InvalidRequest, UnsupportedModel. Long prompts take a while: not for the event loop's thread."""
    check_tools(request)
    tokenizer = client.tokenizer
    template = tokenizer.chat_template
    messages, tools = template_input(template, request, model=request.model)
    check_messages(messages)
    text = tokenizer.render_chat(messages, tools=tools or None, template_options=request.template_options)
    last_line, special = text[-200:], tokenizer.special_tokens
    grammar = answer_grammar(template, request, special, model=request.model, prompt_end=last_line)
    options: dict[str, Any] = {**request.options, "grammar": grammar}
    if keeps_control_tokens(call_format(template, request.model), request, special):
        options["skip_special_tokens"] = False

    def make_parser() -> OutputParser:
        return parser_for(template, request, model=request.model, prompt_end=last_line)

    return AnswerPlan(tokenizer.encode(text, add_special_tokens=False), options, make_parser)
