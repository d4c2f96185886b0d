"""A libp2p host in pure Python: what runs in trio, in the thread of `py_host`.

Owns the host, its Kademlia table (which finds the addresses behind a peer id) and the streams, which are pumped from
and to unix sockets, whose buffers hold back whichever side is faster. Every connection is encrypted and proves its peer
id by Noise; nothing else is offered or taken. Knows neither asyncio nor frames.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import trio
from multiaddr import Multiaddr

from swarm.errors import AddressInUse, NetworkError, PeerUnreachable, UsageError
from swarm.net.libp2p import _libp2p as lp
from swarm.net.libp2p._hivemind import p2pd_pb2 as pb
from swarm.net.libp2p.host import ProtocolNotSupported
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.identity import Identity
from swarm.types import PeerId

logger = logging.getLogger(__name__)

CHUNK = 64 << 10  # bytes pumped at once
GRACE_S = 5.0  # for the other direction of a stream, when one has ended
DIAL_S = 10.0
HANG_UP_S = 3.0  # 0.2 s a connection
_NO_BYTES = (OSError, EOFError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)
LOST = (lp.BaseLibp2pError, lp.RateLimitError, ValueError, KeyError, RuntimeError, *_NO_BYTES)
"""All that py-libp2p and trio raise when a connection, a handshake or a stream comes to nothing."""

_T = TypeVar("_T")


class PyNode:
    """`run` it in trio. Of the other methods, coroutines run in the same trio, by `call`."""

    def __init__(self, identity: Identity, options: HostOptions) -> None:
        """Raises UsageError for what only the daemon can do."""
        _check(options)
        self._identity = identity
        self._options = options
        self._host: Any = None
        self._kad: Any = None
        self._streams: trio.Nursery | None = None
        self._scope = trio.CancelScope()
        self._trio: trio.lowlevel.TrioToken | None = None
        self._ended = False

    # From any thread.

    def call(self, work: Callable[[], Awaitable[_T]], tell: Callable[[_T | NetworkError], None]) -> Callable[[], None]:
        """Await `work()` in trio and, from there, `tell` what it returns or raises. -> what cancels that."""
        scope = trio.CancelScope()
        self._soon(lambda: self._begin(scope, work, tell))
        return lambda: self._soon(scope.cancel)

    def end(self) -> None:
        """Have `run` return."""
        self._ended = True
        self._soon(self._scope.cancel)

    def _soon(self, function: Callable[[], object]) -> None:
        if self._trio is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._trio.run_sync_soon(function)

    # In trio.

    async def run(self, up: Callable[[], object]) -> None:
        """Listen, join, call `up`, and carry streams until `end`. Raises groups of AddressInUse, PeerUnreachable."""
        self._trio = trio.lowlevel.current_trio_token()
        if self._ended:
            return
        listen = [Multiaddr(address) for address in self._options.listen]
        announced = [Multiaddr(address) for address in self._options.advertise] or None
        _claim(self._options.listen)
        self._host = _make_host(self._identity, listen, announced)
        async with self._host.run(listen_addrs=listen):
            network = self._host.get_network()
            await network.auto_connector.stop()  # it would dial whomever it hears of, and again while we hang up
            network.set_stream_handler(functools.partial(_guarded, network.common_stream_handler))
            # The table alone: values and providers would be strangers' bytes kept for nothing.
            self._kad = lp.KadDHT(self._host, lp.DHTMode.SERVER, enable_values=False, enable_providers=False)
            async with lp.background_trio_service(self._kad), trio.open_nursery() as self._streams:
                with self._scope:
                    await self._join()
                    up()
                    await trio.sleep_forever()
                self._streams.cancel_scope.cancel()
            # Before what serves the connections is cancelled, and after all who might dial anew; or sockets stay open.
            await self._hang_up()

    async def _hang_up(self) -> None:
        with trio.move_on_after(HANG_UP_S), contextlib.suppress(*LOST):
            await self._host.close()

    def _begin(
        self, scope: trio.CancelScope, work: Callable[[], Awaitable[_T]], tell: Callable[[_T | NetworkError], None]
    ) -> None:
        if self._streams is None or self._scope.cancel_called:
            tell(NetworkError("py-libp2p is down"))
        else:
            self._streams.start_soon(_work, scope, work, tell)

    async def addresses(self) -> tuple[str, ...]:
        """Multiaddrs, each ending in `/p2p/<peer id>`."""
        return tuple(dict.fromkeys(str(address) for address in self._host.get_addrs()))

    async def connect(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Raises PeerUnreachable."""
        known = list(_readable(addresses, peer))
        with _reaching(peer):
            if known:
                await self._dial(lp.PeerInfo(_id(peer), known))
            else:
                await self._find(peer)

    async def open(self, peer: PeerId, protocol: str, far: socket.socket) -> None:
        """Open a stream and connect it with the socket `far`, which is ours then. Raises PeerUnreachable, ProtocolNotSupported."""
        assert self._streams is not None
        try:
            stream = await self._new_stream(peer, protocol)
        except ProtocolNotSupported:
            raise
        except PeerUnreachable:
            with contextlib.suppress(*LOST):  # a connection that broke is not always noticed before it is used
                await self._host.disconnect(_id(peer))
            stream = await self._new_stream(peer, protocol)
        self._streams.start_soon(pump, stream, far)

    async def _new_stream(self, peer: PeerId, protocol: str) -> Any:
        with _reaching(peer):
            await self._find(peer)
            with trio.fail_after(DIAL_S):
                return await self._host.new_stream(_id(peer), [protocol])

    async def accept(self, protocol: str, path: Path) -> None:
        """See `host.Switchboard.accept_streams`."""
        self._host.set_stream_handler(protocol, functools.partial(_deliver, protocol, path))

    async def _find(self, peer: PeerId) -> None:
        """Make sure of a connection to a peer whose addresses the table may know."""
        target = _id(peer)
        if self._host.is_peer_connected(target):
            return
        with trio.fail_after(DIAL_S):
            info = await self._kad.find_peer(target)
        if info is None or not info.addrs:
            raise PeerUnreachable(f"nobody knows where {peer} is")
        await self._dial(info)

    async def _dial(self, info: Any) -> None:
        self._host.get_network().unblock_peer(info.peer_id)  # when to try again is for our callers to say
        with trio.fail_after(DIAL_S):
            await self._host.connect(info)

    async def _join(self) -> None:
        """Raises PeerUnreachable if there are peers to join and none answers."""
        for address in self._options.peers:
            with contextlib.suppress(PeerUnreachable):
                await self.connect(address.rpartition("/p2p/")[2], (address,))
        if self._options.peers and not self._host.get_connected_peers():
            raise PeerUnreachable(f"none of the peers to join answered: {', '.join(self._options.peers)}")


async def _work(
    scope: trio.CancelScope, work: Callable[[], Awaitable[_T]], tell: Callable[[_T | NetworkError], None]
) -> None:
    result: _T | NetworkError = NetworkError("py-libp2p broke off")
    try:
        with scope:
            result = await work()
    except NetworkError as error:
        result = error
    finally:
        tell(result)


async def pump(stream: Any, far: socket.socket) -> None:
    """Carry bytes both ways between a libp2p stream and a socket until both have ended, or one has broken."""
    far.setblocking(False)
    local = trio.SocketStream(trio.socket.from_stdlib_socket(far))
    try:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for copy in (_outward, _inward):
                    nursery.start_soon(_ending, copy(stream, local), scope)
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + GRACE_S), contextlib.suppress(*LOST):
            await local.aclose()
            await stream.reset()


async def _ending(copy: Awaitable[None], scope: trio.CancelScope) -> None:
    try:
        await copy
    except LOST as error:
        logger.debug("a stream broke: %s", error)
        scope.cancel()
    scope.deadline = min(scope.deadline, trio.current_time() + GRACE_S)


async def _outward(stream: Any, local: trio.SocketStream) -> None:
    while data := await local.receive_some(CHUNK):
        await stream.write(bytes(data))
    await stream.close_write()


async def _inward(stream: Any, local: trio.SocketStream) -> None:
    with contextlib.suppress(lp.StreamEOF):
        while data := await stream.read(CHUNK):
            await local.send_all(data)
    await local.send_eof()


async def _deliver(protocol: str, path: Path, stream: Any) -> None:
    """Hand a stream that a peer opened to whoever listens at `path`."""
    peer = stream.muxed_conn.peer_id
    remote = stream.get_remote_address()
    kind = "ip6" if remote and ":" in remote[0] else "ip4"
    place = Multiaddr(f"/{kind}/{remote[0]}/tcp/{remote[1]}").to_bytes() if remote else b""
    told = pb.StreamInfo(peer=peer.to_bytes(), addr=place, proto=protocol).SerializeToString()
    far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        far.setblocking(False)
        local = trio.socket.from_stdlib_socket(far)
        await local.connect(str(path))
        await trio.SocketStream(local).send_all(bytes([len(told)]) + told)
    except OSError as error:
        logger.debug("nobody takes streams of %s: %s", protocol, error)
        far.close()
        await stream.reset()
        return
    await pump(stream, far)


async def _guarded(handle: Callable[[Any], Awaitable[None]], stream: Any) -> None:
    """py-libp2p ends the whole host when the handler of one stream fails."""
    try:
        await handle(stream)
    except* LOST as errors:
        logger.debug("a stream failed: %s", errors.exceptions)


@contextlib.contextmanager
def _reaching(peer: PeerId) -> Iterator[None]:
    """Raises PeerUnreachable for what py-libp2p and trio raise."""
    try:
        yield
    except NetworkError:
        raise
    except LOST as error:
        if "protocols not supported" in str(error.__cause__):
            raise ProtocolNotSupported(f"{peer} takes no streams of this protocol") from None
        words = str(error) or type(error).__name__
        raise PeerUnreachable(f"cannot reach {peer}: {words.splitlines()[0]}") from None


def _make_host(identity: Identity, listen: Sequence[Multiaddr], announced: Sequence[Multiaddr] | None) -> Any:
    private = lp.Ed25519PrivateKey.from_bytes(identity.to_bytes()[4:36])
    key = lp.KeyPair(private, private.get_public_key())
    noise = lp.Noise(key, noise_privkey=lp.new_noise_key().private_key)
    return lp.new_host(
        key_pair=key,
        sec_opt={lp.NOISE: noise},  # without this it would take plaintext
        muxer_opt={lp.YAMUX: lp.Yamux},
        listen_addrs=listen,
        announce_addrs=announced,
        addrs_factory=None if announced else _of_interfaces,
    )


def _of_interfaces(addresses: Sequence[Multiaddr]) -> list[Multiaddr]:
    """`/ip4/0.0.0.0/tcp/4001` as one address for each of this machine's."""
    found: list[Multiaddr] = []
    for address in map(str, addresses):
        _, kind, host, rest = address.split("/", 3)
        if not ipaddress.ip_address(host).is_unspecified:
            found.append(Multiaddr(address))
            continue
        own = (entry.address for entries in psutil.net_if_addrs().values() for entry in entries)
        found += [Multiaddr(f"/{kind}/{ip}/{rest}") for ip in own if _is_of(kind, ip)]
    return found


def _is_of(kind: str, host: str) -> bool:
    try:
        ip = ipaddress.ip_address(host)  # not the MAC addresses, nor `fe80::1%eth0`
    except ValueError:
        return False
    return ip.version == (6 if kind == "ip6" else 4) and not ip.is_link_local


def _check(options: HostOptions) -> None:
    if options.relays or options.relay_server:
        raise UsageError("relays need the p2p daemon: leave out --libp2p python, or --relay-via and --relay-server")
    for address in options.listen:
        if not re.fullmatch(r"/ip[46]/[^/]+/tcp/\d+", address):
            raise UsageError(f"--libp2p python listens on TCP only, not on {address}")


def _claim(listen: Sequence[str]) -> None:
    """Raises AddressInUse, UsageError: py-libp2p would only log it, or share the port with whoever has it."""
    for address in listen:
        _, kind, host, _, port, *_ = address.split("/")
        with socket.socket(socket.AF_INET6 if kind == "ip6" else socket.AF_INET) as test:
            test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                test.bind((host, int(port)))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise UsageError(f"cannot listen on {address}: {error.strerror}") from None
                raise AddressInUse(f"cannot listen on {address}: the port is taken; choose another, or use 0") from None


def _readable(addresses: Iterable[str], peer: PeerId) -> Iterable[Multiaddr]:
    """Those that make sense and that TCP alone can dial."""
    for text in addresses:
        plain = text.removesuffix(f"/p2p/{peer}")
        try:
            address = Multiaddr(plain)
        except ValueError:
            continue
        if [protocol.name for protocol in address.protocols()][1:] == ["tcp"]:
            yield address


def _id(peer: PeerId) -> Any:
    try:
        return lp.ID.from_base58(peer)
    except ValueError:
        raise PeerUnreachable(f"'{peer}' is not a peer id") from None
