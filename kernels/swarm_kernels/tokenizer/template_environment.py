"""The Jinja environment of chat templates: a sandbox with the globals that transformers gives to templates.

Owns what a template can call and the checks inside a rendering. Runs in `template_worker`'s process, which bounds what
no check inside can; elsewhere a template is only parsed. Imports nothing but Jinja, so that the process starts quickly.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHAT_LENGTH = 8 << 20  # characters of messages, tools and options, and of the prompt; contexts hold less
RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)
"""All that a template in the sandbox raises."""
COMPILE_ERRORS = (*RENDER_ERRORS, SyntaxError)
"""All that Jinja and Python raise on a hostile template before it runs: Python's parser has limits of its own."""


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


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Every call in a template checks the time of the rendering; one rendering at a time."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])  # Jinja computes others of constants when it compiles

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._limit_s = self._deadline = 0.0
        self.filters["tojson"] = _to_json
        functions: dict[str, Callable[..., Any]] = {
            "raise_exception": _raise,
            "strftime_now": _now,
            "dict": _make_dict,  # a function, so that a template cannot reach the type
            "namespace": _PlainNamespace,
        }
        self.globals.update(functions)

    def compile_source(self, source: str) -> Template:
        """Raises COMPILE_ERRORS."""
        return self.from_string(_with_ticks(self.parse(source)))

    def render(self, template: Template, variables: Mapping[str, Any], limit_s: float) -> str:
        """Raises RENDER_ERRORS."""
        self._limit_s, self._deadline = limit_s, time.monotonic() + limit_s
        pieces: list[str] = []
        length = 0
        for piece in template.generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_CHAT_LENGTH:
                raise TemplateError(f"it makes more than {MAX_CHAT_LENGTH} characters of them")
        return "".join(pieces)

    def tick(self) -> None:
        if time.monotonic() > self._deadline:
            raise TemplateError(f"it takes more than {self._limit_s:g} s")

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


def variables_of(source: str) -> set[str]:
    """The variables that a template expects to be given. Computes nothing of it. Raises COMPILE_ERRORS."""
    environment = TemplateEnvironment()
    tree = environment.parse(source)
    # Filters and tests of constants would be applied, with whatever they allocate.
    environment.filters = dict.fromkeys(environment.filters, _unused)
    environment.tests = dict.fromkeys(environment.tests, _unused)
    return meta.find_undeclared_variables(tree)


def _unused(*args: Any, **kwargs: Any) -> str:
    return ""


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
