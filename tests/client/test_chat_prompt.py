"""SwarmClient's chat calls with tools and template options: what reaches the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from memory_swarm import NumberTokenizer, cut, memory_swarm
from tiny_models import ModelTensors, tiny_model
from virtual_clock import virtual_time

from swarm.errors import InvalidRequest
from swarm_client import SwarmClient, SyncSwarmClient

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "5"}, CALL, {"role": "tool", "content": "6"}]


class ToolTokenizer(NumberTokenizer):
    """Adds 100 for tools and 101 for options to the prompt."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        contents = [token for message in messages for token in self.encode(message.get("content") or "9")]
        return [*contents, *(100 for _ in tools or ()), *(101 for _ in template_options or ())]


def test_the_prompt_is_the_template_s() -> None:
    client = SwarmClient(tokenizer=ToolTokenizer())  # type: ignore[arg-type]
    assert client.chat_prompt(CHAT) == [5, 9, 6]
    assert client.chat_prompt(CHAT, tools=[TOOL, TOOL], template_options={"enable_thinking": True}) == [
        *(5, 9, 6, 100, 100, 101)
    ]
    for messages in ([], [{"role": "user", "content": None}], [{"role": "assistant", "content": None}], ["hi"]):
        with pytest.raises(InvalidRequest):
            client.chat_prompt(messages)  # type: ignore[arg-type]


@virtual_time
async def test_every_chat_call_takes_tools() -> None:
    source = ModelTensors(tiny_model("llama"))
    options: dict[str, Any] = {"tools": [TOOL], "template_options": {"x": 1}, "max_new_tokens": 2}
    async with (
        memory_swarm(source, cut(6, 3)) as swarm,
        swarm.client(tokenizer=ToolTokenizer(), decoding="outline") as client,
    ):
        answer = await client.chat(CHAT, **options)
        assert answer.prompt_token_ids == (5, 9, 6, 100, 101)
        assert answer.outline is None  # its prompts know no tools
        streamed = await client.chat_stream(CHAT, **options).read()
        assert streamed.token_ids == answer.token_ids


def test_the_blocking_client_has_the_same_calls() -> None:
    names = {name for name in vars(SwarmClient) if not name.startswith("_")}
    assert names - {name for name in vars(SyncSwarmClient) if not name.startswith("_")} == {
        "chain_costs",
        "context_length",
        "home",
        "tokenizer",
    }
