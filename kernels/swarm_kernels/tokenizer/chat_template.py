"""A model's Jinja chat template, run in a sandbox, with the globals that transformers gives to templates.

Messages come from strangers: their size, the prompt's and the time are bounded. A template comes from files that the
user chose: it cannot run for ever, but what one of its expressions allocates is not bounded in every case.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from swarm.errors import CorruptModel, InvalidRequest

MAX_CHAT_LENGTH = 8 << 20  # characters of messages, tools and options, and of the prompt; contexts hold less
MAX_CHAT_VALUES = 1 << 17  # strings, numbers and lists in them
MAX_RENDER_S = 2.0  # real chats take milliseconds


class ChatTemplate:
    """Renders messages into one prompt text. A template can loop, but cannot reach files or Python's internals.

    `supports_tools`: whether it mentions the tools that a model may call.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """`special`: `bos_token` and the like, which templates use. Raises CorruptModel."""
        self._special = dict(special)
        self._environment = _Environment()
        try:
            tree = self._environment.parse(source)
            self.supports_tools = "tools" in meta.find_undeclared_variables(tree)
            self._template: Template = self._environment.from_string(_with_ticks(tree))
        except (TemplateError, RecursionError) as error:
            raise CorruptModel(f"the model's chat template cannot be parsed: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """`tools`: functions in OpenAI's form. `template_options`: further variables, such as `enable_thinking`.

        Raises InvalidRequest when a message is malformed or the template rejects the conversation.
        """
        options = dict(template_options or {})
        self._check(messages, tools, options)
        variables = {
            "messages": [dict(message) for message in messages],
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        length = 0
        try:
            with self._environment.limited():
                for piece in self._template.generate({**self._special, **options, **variables}):
                    pieces.append(piece)
                    length += len(piece)
                    if length > MAX_CHAT_LENGTH:
                        raise TemplateError(f"it makes more than {MAX_CHAT_LENGTH} characters of them")
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
            MemoryError,
        ) as error:
            raise InvalidRequest(f"the model's chat template does not take these messages: {error}") from None
        return "".join(pieces)

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
        taken = {"messages", "tools", "documents", "add_generation_prompt", *self._special, *self._environment.globals}
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


def _with_ticks(tree: nodes.Template) -> nodes.Template:
    """`tree` with a call in every loop, as calls are where the time is checked."""
    for loop in tree.find_all(nodes.For):
        tick = nodes.ExprStmt(lineno=loop.lineno)
        tick.node = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None, lineno=loop.lineno)
        loop.body.insert(0, tick)
    return tree


class _Generation(Extension):
    """`{% generation %}` blocks mark the assistant's part for training; here they are rendered as they are."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Every call in a template checks the time of the rendering in this thread."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._local = threading.local()
        self.filters["tojson"] = _to_json
        functions: dict[str, Callable[..., Any]] = {
            "raise_exception": _raise,
            "strftime_now": _now,
            "dict": _make_dict,  # a function, so that a template cannot reach the type
            "namespace": _PlainNamespace,
        }
        self.globals.update(functions)

    @contextmanager
    def limited(self) -> Iterator[None]:
        self._local.deadline = time.monotonic() + MAX_RENDER_S
        yield

    def tick(self) -> None:
        if time.monotonic() > self._local.deadline:
            raise TemplateError(f"it takes more than {MAX_RENDER_S:.0f} s")

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        return None if function == self.tick else super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses to multiply texts and lists, and powers of which one would fill the memory."""
        if operator == "**" and not (abs(left) <= 1 << 16 and abs(right) <= 64):
            raise TemplateError("it computes too large a power")
        if operator == "*" and not all(isinstance(side, int | float) for side in (left, right)):
            times = left if isinstance(left, int) else right
            if not isinstance(times, int) or times * len(right if times is left else left) > MAX_CHAT_LENGTH:
                raise TemplateError("it repeats a text or a list too often")
        return super().call_binop(context, operator, left, right)


class _PlainNamespace(Namespace):
    """Jinja's namespace without underscored names, which could replace its internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self` parameter: a template may name a value `self`
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _reject_underscore(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _reject_underscore(name)
        super().__setitem__(name, value)


def _reject_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not set '{name}'")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(style: str) -> str:
    return datetime.now().strftime(style)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
