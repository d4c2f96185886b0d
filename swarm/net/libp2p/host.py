"""What carries streams between peers that prove their identity: hivemind's p2p daemon, or py-libp2p in a thread.

Owns what both promise to the transport above (`libp2p_streams`) and to the directory beside it. They are `go_daemon.GoDaemonHost`
and `py_host.PyHost`; on the wire they are the same, so that a swarm may mix them.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from swarm.codec import DEFAULT_LIMITS, FrameLimits
from swarm.config import Libp2pImpl
from swarm.errors import PeerUnreachable
from swarm.net.base.frame_stream import FramedStream
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.identity import Identity
from swarm.types import PeerId


class ProtocolNotSupported(PeerUnreachable):
    """The peer was reached, but takes no streams of that protocol."""


class HostControl(Protocol):
    """What a host is asked for. All raise NetworkError when it is gone."""

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        """-> its peer id and the addresses it can be dialled at, each ending in `/p2p/<peer id>`."""
        ...

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Make sure of a connection to `peer`; addresses that make no sense are passed over. Raises PeerUnreachable."""
        ...

    async def open_stream(self, peer: PeerId, protocol: str, limits: FrameLimits = DEFAULT_LIMITS) -> FramedStream:
        """A stream to a peer that we are connected to, or that the host can find. Raises PeerUnreachable, ProtocolNotSupported."""
        ...

    async def accept_streams(self, protocol: str, path: Path) -> None:
        """From now on, streams that others open are delivered to the unix socket `path`, each after a message that
        says who opened it, see `p2pd_control.accepted_peer`.
        """
        ...


class Libp2pHost(Protocol):
    """One of them at work. `failed` is set when it has died and cannot be brought back."""

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
        """Of the process it is; 0 if it is none of its own."""
        ...

    async def calls(self) -> Any:
        """What hivemind's `DHTNode` takes for its `P2P`; whoever asked for it shuts it down."""
        ...

    async def refresh(self) -> None:
        """Ask again where we can be dialled: routers and relays take their time. Raises NetworkError."""
        ...

    def on_down(self, tell: Callable[[], None]) -> None:
        """Call `tell` whenever it has died: every connection through it is lost."""
        ...

    def on_up(self, tell: Callable[[], Awaitable[None]]) -> None:
        """Await `tell` whenever it has been started again, those who asked first before the others."""
        ...

    async def stop(self) -> None:
        """End it, even if cancelled meanwhile. Idempotent."""
        ...


async def start(identity: Identity, options: HostOptions | None, libp2p_impl: Libp2pImpl) -> Libp2pHost:
    """Start the host of that kind. Importing either takes seconds, in which others can work. Raises as `Libp2pHost.start`."""
    name, kind = ("py_host", "PyHost") if libp2p_impl == "python" else ("go_daemon", "GoDaemonHost")
    module = await asyncio.to_thread(importlib.import_module, f"swarm.net.libp2p.{name}")
    made: type[Libp2pHost] = getattr(module, kind)
    return await made.start(identity, options)
