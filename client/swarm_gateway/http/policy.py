"""The bounds of what an HTTP request may bring, whoever sent it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpPolicy:
    """`max_depth` is far below the recursion limits of the libraries that read JSON."""

    max_depth: int = 64  # of arrays and objects in each other
    max_containers: int = 1 << 16  # arrays and objects: a million of them take seconds to read
    header_timeout_s: float = 15.0  # for the whole header of a request, from its first byte or the connection's start
    body_timeout_s: float = 60.0  # for the whole body: who sends a byte at a time only holds a connection
    max_header_bytes: int = 32 << 10
    max_connections: int = 512  # further ones are closed; many systems give a process 1024 files
    keep_alive_s: int = 30  # an idle connection
    drain_s: float = 10.0  # for open streams when the gateway stops


POLICY = HttpPolicy()
