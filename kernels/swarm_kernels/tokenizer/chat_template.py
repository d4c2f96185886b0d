"""A model's Jinja chat template, run in a sandbox, with the globals that transformers gives to templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from swarm.errors import CorruptModel, InvalidRequest


class ChatTemplate:
    """Renders messages into one prompt text. A template can loop, but cannot reach files or Python's internals."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """`special`: `bos_token` and the like, which templates use. Raises CorruptModel."""
        self._special = dict(special)
        try:
            self._template: Template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise CorruptModel(f"the model's chat template cannot be parsed: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """Raises InvalidRequest when a message is malformed or the template rejects the conversation."""
        _check(messages)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ) as error:
            raise InvalidRequest(f"the model's chat template does not take these messages: {error}") from None


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise InvalidRequest("a chat needs at least one message")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"message {number} has no role; give it as system, user or assistant")
        if not isinstance(message.get("content"), str):
            raise InvalidRequest(f"message {number} has no text as its content")


class _Generation(Extension):
    """`{% generation %}` blocks mark the assistant's part for training; here they are rendered as they are."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": _make_dict,  # a function, so that a template cannot reach the type
        "namespace": _PlainNamespace,
    }
    environment.globals.update(functions)
    return environment


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
