"""The Response object of the Responses API: what a request said, and how far its answer is."""

from __future__ import annotations

from typing import Any

import msgspec

from swarm_gateway.chat.events import TokenUsage
from swarm_gateway.responses.requests import ResponsesBody


def response_head(request: ResponsesBody, response_id: str, model: str, created_at: int) -> dict[str, Any]:
    """A response that has just begun. All fields are there, as Open Responses demands, null where nothing was said."""
    text = request.text
    reasoning = request.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": _format(request), "verbosity": (text and text.verbosity) or "medium"},
        "tool_choice": request.tool_choice or "auto",
        "tools": [_tool(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
    }


def usage_json(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _format(request: ResponsesBody) -> dict[str, Any]:
    wanted = request.text.format if request.text is not None else None
    if wanted is None or wanted.type != "json_schema":
        return {"type": wanted.type if wanted else "text"}
    found: dict[str, Any] = msgspec.to_builtins(wanted)
    return {**found, "strict": bool(wanted.strict)}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """As it was understood: `strict` is off unless asked for."""
    names = ("type", "name", "description", "parameters", "strict")
    return {**{name: tool.get(name) for name in names}, "strict": bool(tool.get("strict"))}
