"""The libp2p host, which opens streams between authenticated peers: hivemind's Go daemon, or py-libp2p in a thread.

Owns the interface that both give to the transport above (`libp2p_streams`) and to the directory beside it. They are
`go_daemon.GoDaemonHost` and `py_host.PyHost`; on the wire they are the same, so that a swarm may mix them.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

from swarm.codec import DEFAULT_LIMITS, FrameLimits
from swarm.config import Libp2pImpl
from swarm.errors import PeerUnreachable, UsageError
from swarm.net.base.frame_stream import FramedStream
from swarm.net.base.tls_addresses import libp2p_addresses
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.identity import Identity
from swarm.types import PeerId

_OPTIONAL = ("libp2p", "trio")  # packages that the extra of `--libp2p python` brings


class ProtocolNotSupported(PeerUnreachable):
    """The peer was reached, but accepts no streams of that protocol."""


class HostControl(Protocol):
    """The requests that a host answers. All raise NetworkError when it has ended."""

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        """-> its peer id and the addresses it can be dialled at, each ending in `/p2p/<peer id>`."""
        ...

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Ensure a connection to `peer`; malformed addresses are ignored. Raises PeerUnreachable."""
        ...

    async def connected(self) -> dict[PeerId, str]:
        """The IP address at the other end of each peer's connection; "" if that is a relay."""
        ...

    async def open_stream(self, peer: PeerId, protocol: str, limits: FrameLimits = DEFAULT_LIMITS) -> FramedStream:
        """A stream to a peer that we are connected to, or that the host can find.

        Raises PeerUnreachable, ProtocolNotSupported.
        """
        ...

    async def accept_streams(self, protocol: str, path: Path) -> None:
        """From now on, streams that others open are delivered to the unix socket `path`, each after a preamble with
        the peer that opened it, see `go_daemon_control.accepted_peer`.
        """
        ...


class Libp2pHost(Protocol):
    """A running host. `failed` is set when it has died and cannot be restarted."""

    failed: asyncio.Event
    addresses: tuple[str, ...]
    inbound: Path
    restarts: int

    @classmethod
    async def start(cls, identity: Identity, options: HostOptions | None = None) -> Self:
        """Raises UsageError, AddressInUse, IdentityError, PeerUnreachable (of `peers`, none answered), NetworkError."""
        ...

    @property
    def control(self) -> HostControl: ...

    @property
    def pid(self) -> int:
        """Of its process; 0 if it has none of its own."""
        ...

    async def hivemind_p2p(self) -> Any:
        """A `hivemind.P2P`, or a stand-in, for a `DHTNode`; the caller shuts it down."""
        ...

    async def refresh(self) -> None:
        """Query again where we can be dialled: NAT mappings and relays appear late. Raises NetworkError."""
        ...

    def on_down(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever it has died: every connection through it is lost."""
        ...

    def on_up(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Await `callback` whenever it has been restarted, in the order of registration."""
        ...

    async def stop(self) -> None:
        """End it, even if cancelled meanwhile. Idempotent."""
        ...


async def start(identity: Identity, options: HostOptions | None, libp2p_impl: Libp2pImpl) -> Libp2pHost:
    """Start the host of that kind. Raises as `Libp2pHost.start`; UsageError if its package is not installed.

    Importing either takes seconds, so it is done in a thread, while the event loop runs on.
    """
    if options is not None and options.peers:
        peers = libp2p_addresses(options.peers)
        if not peers:
            raise UsageError(
                "all addresses of peers are of direct connections (/tls/); a node joins by a libp2p address"
            )
        options = replace(options, peers=peers)
    name, kind = ("py_host", "PyHost") if libp2p_impl == "python" else ("go_daemon", "GoDaemonHost")
    try:
        module = await asyncio.to_thread(importlib.import_module, f"swarm.net.libp2p.{name}")
    except ModuleNotFoundError as error:
        if libp2p_impl != "python" or error.name not in _OPTIONAL:
            raise
        raise UsageError("--libp2p python needs py-libp2p: pip install 'swarm-llm[libp2p]'") from error
    made: type[Libp2pHost] = getattr(module, kind)
    return await made.start(identity, options)
