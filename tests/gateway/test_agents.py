"""An agent framework: openai-agents runs a tool and goes on, over both of OpenAI's APIs, streamed and not."""

from __future__ import annotations

from typing import Any

import pytest
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI
from scripted import KEYS, MODEL, Script, serving

from swarm_gateway.chat.events import ReasoningDelta, TextDelta, ToolCallDelta

QUIET = RunConfig(tracing_disabled=True)  # tracing would send the conversation to OpenAI
CALL = (ReasoningDelta("ask"), ToolCallDelta(0, "c1", "weather"), ToolCallDelta(0, arguments='{"city":"Ulm"}'))


@pytest.mark.parametrize("api_of_model", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_calls_a_tool(streamed: bool, api_of_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(CALL)
    asked = []

    @function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        script.events = (TextDelta("It rains."),)
        return "rain"

    async with serving(script, monkeypatch) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key=KEYS[0]) as api:
        agent = Agent(name="a", instructions="Help.", model=api_of_model(MODEL, api), tools=[weather])
        if streamed:
            result = Runner.run_streamed(agent, "Rain in Ulm?", run_config=QUIET)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, "Rain in Ulm?", run_config=QUIET)
    assert (result.final_output, asked) == ("It rains.", ["Ulm"])
    assert script.requests[0].tools[0].strict
    assert [message["role"] for message in script.requests[1].messages] == ["system", "user", "assistant", "tool"]
    if api_of_model is OpenAIResponsesModel:  # chat completions have no field for it that the framework knows
        assert script.requests[1].messages[2]["reasoning_content"] == "ask"
