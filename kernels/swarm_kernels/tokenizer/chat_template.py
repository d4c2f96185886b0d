"""A model's Jinja chat template: messages in, a prompt out.

Messages come from strangers, and a template from files that strangers made. What comes in is checked here; the template
runs in a sandbox (`template_environment`) in a process of its own (`template_process`), which bounds time and memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swarm.errors import CorruptModel, InvalidRequest
from swarm_kernels.tokenizer.template_environment import (
    COMPILE_ERRORS,
    MAX_CHAT_LENGTH,
    TemplateEnvironment,
    variables_of,
)
from swarm_kernels.tokenizer.template_process import RENDERER

MAX_CHAT_VALUES = 1 << 17  # strings, numbers and lists in them
MAX_TEMPLATE = 1 << 18  # characters; real ones have up to 20,000
MAX_RENDER_S = 2.0  # real chats take milliseconds


class ChatTemplate:
    """Renders messages into one prompt text. A template can loop, but cannot reach files or Python's internals.

    `supports_tools`: whether it mentions the tools that a model may call.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """`special`: `bos_token` and the like, which templates use. Raises CorruptModel."""
        self._special = dict(special)
        self._source = source
        self._taken = frozenset(TemplateEnvironment().globals)
        try:
            if len(source) > MAX_TEMPLATE:
                raise ValueError(f"it has {len(source)} characters")
            self.supports_tools = "tools" in variables_of(source)
        except COMPILE_ERRORS as error:
            raise CorruptModel(f"the model's chat template cannot be parsed: {error!s:.300}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """`tools`: functions in OpenAI's form. `template_options`: further variables, such as `enable_thinking`.

        Raises InvalidRequest when a message is malformed or the template rejects the conversation, CorruptModel when it
        cannot be compiled.
        """
        options = dict(template_options or {})
        self._check(messages, tools, options)
        variables = {
            "messages": [dict(message) for message in messages],
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return RENDERER.render(self._source, {**self._special, **options, **variables}, MAX_RENDER_S)

    def _check(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> None:
        if not messages:
            raise InvalidRequest("a chat needs at least one message")
        for number, message in enumerate(messages, 1):
            _check_message(number, message)
        if not all(isinstance(tool, Mapping) for tool in tools or ()):
            raise InvalidRequest("a tool must be an object")
        taken = {"messages", "tools", "documents", "add_generation_prompt", *self._special, *self._taken}
        for name in options:
            if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or name in taken:
                raise InvalidRequest(f"{name!r} is no option of a chat template")
        _check_size((messages, tools, options))


def _check_message(number: int, message: Mapping[str, Any]) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"message {number} has no role; give it as system, user, assistant or tool")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, Sequence) and all(isinstance(call, Mapping) for call in calls)):
        raise InvalidRequest(f"the tool calls of message {number} are not a list of objects")
    only_calls = message["role"] == "assistant" and calls and message.get("content") is None
    if not isinstance(message.get("content"), str) and not only_calls:
        raise InvalidRequest(f"message {number} has no text as its content")


def _check_size(value: Any) -> None:
    """Raises InvalidRequest if there are too many or too long values, or some that JSON does not have."""
    waiting, count, length = [value], 0, 0
    while waiting:
        item = waiting.pop()
        count += 1
        if isinstance(item, str):
            length += len(item)
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            waiting += item
        elif item is not None and not isinstance(item, bool | int | float):
            raise InvalidRequest(f"a chat may not contain a {type(item).__name__}; give text, numbers, lists, objects")
        if max(length, len(waiting)) > MAX_CHAT_LENGTH or count > MAX_CHAT_VALUES:
            raise InvalidRequest(
                f"the chat is too long: more than {MAX_CHAT_LENGTH} characters or {MAX_CHAT_VALUES} values"
            )
