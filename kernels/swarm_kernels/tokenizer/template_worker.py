"""The process in which chat templates run: one request after the other, each within a time and a memory.

    request = u32 length | JSON {"source", "variables", "limit_s"}
    reply   = u32 length | JSON {"text"} or {"error": a sentence, "at": "compile" or "render"}

Owns the limits that hold whatever a template does: the kernel ends the process when the time is over, and refuses it
memory beyond the limit. It ends with the other side of its pipes. `template_process` starts it.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from contextlib import suppress
from typing import IO, Any

from jinja2 import Template

from swarm_kernels.tokenizer.template_environment import COMPILE_ERRORS, RENDER_ERRORS, TemplateEnvironment

MAX_MEMORY = 1 << 30  # bytes of address space; a chat of the largest size takes half of it
GRACE_S = 1.0  # beyond the request's limit, which the environment checks itself: it gives a better sentence
LENGTH = struct.Struct("<I")
_KEPT = 4  # compiled templates


class _Templates:
    """The latest templates, compiled."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[TemplateEnvironment, Template]] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, str]:
        source = request["source"]
        try:
            if source not in self._kept:
                environment = TemplateEnvironment()
                compiled = environment, environment.compile_source(source)
                while len(self._kept) >= _KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[source] = compiled
        except COMPILE_ERRORS as error:
            return {"error": f"{error!s:.300}" or type(error).__name__, "at": "compile"}
        try:
            environment, template = self._kept[source]
            return {"text": environment.render(template, request["variables"], request["limit_s"])}
        except RENDER_ERRORS as error:
            return {"error": f"{error!s:.300}" or type(error).__name__, "at": "render"}


def pack(value: dict[str, Any]) -> bytes:
    """A request or a reply as bytes. Raises ValueError, TypeError, RecursionError."""
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(data)) + data


def receive(stream: IO[bytes]) -> dict[str, Any] | None:
    """The next request or reply; None at the end. Raises OSError, ValueError."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    data = stream.read(LENGTH.unpack(head)[0])
    if len(data) < LENGTH.unpack(head)[0]:
        return None
    value: dict[str, Any] = json.loads(data.decode("utf-8", "surrogatepass"))
    return value


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the program that started us
    with suppress(ValueError, OSError):  # not every system can limit it
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    templates = _Templates()
    while (request := receive(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"] + GRACE_S)  # SIGALRM ends this process
        reply = pack(templates.answer(request))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(reply)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
