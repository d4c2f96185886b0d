"""Runs chat templates in a process of their own, started with the first and again after each that had to be ended.

Owns that process: one for the whole program, as a template takes milliseconds. What it may use is `template_worker`'s.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from swarm.errors import CorruptModel, InvalidRequest, ResourceError
from swarm_kernels.tokenizer.template_worker import pack, receive

_WORKER = "swarm_kernels.tokenizer.template_worker"
_CLOSE_S = 1.0


class TemplateProcess:
    """One worker, used by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the worker, so that the first `render` finds it there. Where it cannot be started, that will say so."""
        with self._lock, contextlib.suppress(ResourceError):
            self._running()

    def render(self, source: str, variables: Mapping[str, Any], limit_s: float) -> str:
        """Raises InvalidRequest, CorruptModel for a template that cannot be compiled, ResourceError."""
        try:
            request = pack({"source": source, "variables": dict(variables), "limit_s": limit_s})
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidRequest(f"the chat is not made of text, numbers, lists and objects: {error}") from None
        with self._lock:
            reply = self._answer(request)
        if reply is None:
            raise _refused("it takes too much time or memory")
        if reply.get("at") == "compile":
            raise CorruptModel(f"the model's chat template cannot be compiled: {reply['error']}")
        if "text" not in reply:
            raise _refused(reply["error"])
        text: str = reply["text"]
        return text

    def close(self) -> None:
        """Idempotent; the next `render` starts it again."""
        with self._lock:
            self._end()

    def _answer(self, request: bytes) -> dict[str, Any] | None:
        """None if the worker was ended by its limits."""
        for _ in range(2):
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(request)
                process.stdin.flush()
                reply = receive(process.stdout)
            except (OSError, ValueError):
                reply = None
            if reply is not None:
                return reply
            code = self._end()
            if code not in (-signal.SIGTERM, -signal.SIGHUP):  # somebody else ended it: once more
                break
        return None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [sys.executable, "-m", _WORKER]
            pipe, none = subprocess.PIPE, subprocess.DEVNULL
            try:
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=none, env=environment)
            except OSError as error:
                raise ResourceError(f"no process for chat templates can be started: {error.strerror}") from None
        return self._process

    def _end(self) -> int:
        """-> its exit code, negative for a signal."""
        process, self._process = self._process, None
        if process is None:
            return 0
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:  # what it had not read is lost with it
                    continue
        try:
            return process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"the model's chat template does not take these messages: {why}")


RENDERER = TemplateProcess()
"""The program's own."""
atexit.register(RENDERER.close)
