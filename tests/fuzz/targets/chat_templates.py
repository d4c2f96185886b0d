"""Chat templates in their sandbox: a text or one of the errors that are expected of it. `template_worker`'s process
bounds time and memory besides, which here libFuzzer does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from swarm_kernels.tokenizer.template_environment import (
    COMPILE_ERRORS,
    RENDER_ERRORS,
    TemplateEnvironment,
    variables_of,
)

INSTRUMENT = ("swarm_kernels.tokenizer.template_environment", "jinja2")
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [{"a": 1}]}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "add_generation_prompt": True, "bos_token": "<s>",
}  # fmt: skip


def run(data: bytes) -> None:
    try:
        source = data.decode()
        variables_of(source)
        environment = TemplateEnvironment()
        template = environment.compile_source(source)
    except COMPILE_ERRORS:
        return
    try:
        text = environment.render(template, CHAT, 0.5)
    except RENDER_ERRORS:
        return
    assert isinstance(text, str)


def seeds() -> Iterator[bytes]:
    yield (
        b"{{ bos_token }}{% for m in messages %}{{ '<' + m['role'] + '>' ~ m.content | trim }}"
        b"{% if loop.last and add_generation_prompt %}{{ '<a>' }}{% endif %}{% endfor %}"
    )
    yield (
        b"{%- set ns = namespace(n=0) %}{% for t in tools or [] %}{% set ns.n = ns.n + 1 %}{{ t | tojson(indent=2) }}"
        b"{% endfor %}{% macro f(x, y=2) %}{{ x * y }}{% endmacro %}{{ f(3) }}{{ messages[0].content.split('i')[0] }}"
    )
    yield b"{% generation %}{{ dict(a=1).items() | list }}{% break %}{% endgeneration %}{{ raise_exception('x') }}"
    yield b"{% for i in range(9) recursive %}{{ loop.index0 % 2 }}{% continue %}{% endfor %}{{ '%5d' | format(3) }}"
