"""A libp2p host in pure Python: the trio side of `py_host`, which runs in its thread.

Owns the host, its Kademlia routing table (which finds the addresses of a peer id) and the streams, which are copied to
and from unix sockets, whose buffers give back-pressure. Every connection is encrypted and authenticated by Noise;
nothing else is offered or accepted. Knows neither asyncio nor frames.
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
from swarm.net.libp2p.policy import PyHostPolicy
from swarm.net.security.identity import Identity
from swarm.types import PeerId

logger = logging.getLogger(__name__)

POLICY = PyHostPolicy()
_IO_ERRORS = (OSError, EOFError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)
STREAM_ERRORS = (lp.BaseLibp2pError, lp.RateLimitError, ValueError, KeyError, RuntimeError, *_IO_ERRORS)
"""All that py-libp2p and trio raise when a connection, a handshake or a stream fails."""

_T = TypeVar("_T")


class PyNode:
    """`run` it in trio. Of the other methods, coroutines run in the same trio, by `call`."""

    def __init__(self, identity: Identity, options: HostOptions) -> None:
        """Raises UsageError for options that only the Go daemon supports."""
        _check(options)
        self._identity = identity
        self._options = options
        self._host: Any = None
        self._kad: Any = None
        self._nursery: trio.Nursery | None = None
        self._scope = trio.CancelScope()
        self._trio: trio.lowlevel.TrioToken | None = None
        self._ended = False

    # From any thread.

    def call(
        self, work: Callable[[], Awaitable[_T]], on_done: Callable[[_T | NetworkError], None]
    ) -> Callable[[], None]:
        """Await `work()` in trio and call `on_done` there with its result or error. -> a function that cancels it."""
        scope = trio.CancelScope()
        self._run_soon(lambda: self._start(scope, work, on_done))
        return lambda: self._run_soon(scope.cancel)

    def end(self) -> None:
        """Make `run` return."""
        self._ended = True
        self._run_soon(self._scope.cancel)

    def _run_soon(self, function: Callable[[], object]) -> None:
        if self._trio is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._trio.run_sync_soon(function)

    # In trio.

    async def run(self, up: Callable[[], object]) -> None:
        """Listen, join, call `up`, and serve streams until `end`. Raises groups of AddressInUse, PeerUnreachable."""
        self._trio = trio.lowlevel.current_trio_token()
        if self._ended:
            return
        listen = [Multiaddr(address) for address in self._options.listen]
        advertised = [Multiaddr(address) for address in self._options.advertise] or None
        _check_ports(self._options.listen)
        self._host = _make_host(self._identity, listen, advertised)
        async with self._host.run(listen_addrs=listen):
            network = self._host.get_network()
            await network.auto_connector.stop()  # it would dial every peer it discovers, and again while we disconnect
            network.set_stream_handler(functools.partial(_suppress_errors, network.common_stream_handler))
            # The routing table alone: values and providers would be untrusted bytes stored without a use.
            self._kad = lp.KadDHT(self._host, lp.DHTMode.SERVER, enable_values=False, enable_providers=False)
            async with lp.background_trio_service(self._kad), trio.open_nursery() as self._nursery:
                with self._scope:
                    await self._join()
                    up()
                    await trio.sleep_forever()
                self._nursery.cancel_scope.cancel()
            # Before the connections' services are cancelled, and after all that might dial again; or sockets leak.
            await self._disconnect()

    async def _disconnect(self) -> None:
        with trio.move_on_after(POLICY.disconnect_timeout_s), contextlib.suppress(*STREAM_ERRORS):
            await self._host.close()

    def _start(
        self, scope: trio.CancelScope, work: Callable[[], Awaitable[_T]], on_done: Callable[[_T | NetworkError], None]
    ) -> None:
        if self._nursery is None or self._scope.cancel_called:
            on_done(NetworkError("py-libp2p is down"))
        else:
            self._nursery.start_soon(_run_call, scope, work, on_done)

    async def addresses(self) -> tuple[str, ...]:
        """Multiaddrs, each ending in `/p2p/<peer id>`."""
        return tuple(dict.fromkeys(str(address) for address in self._host.get_addrs()))

    async def connect(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Raises PeerUnreachable."""
        dialable = list(_dialable(addresses, peer))
        with _translated_errors(peer):
            if dialable:
                await self._dial(lp.PeerInfo(_id(peer), dialable))
            else:
                await self._find(peer)

    async def connected(self) -> dict[PeerId, str]:
        """See `host.HostControl.connected`. py-libp2p uses no relays."""
        found: dict[PeerId, str] = {}
        for peer, connections in list(self._host.get_network().connections.items()):
            remotes = (connection.muxed_conn.get_remote_address() for connection in connections)
            found[peer.to_base58()] = next((remote[0] for remote in remotes if remote), "")
        return found

    async def open(self, peer: PeerId, protocol: str, far: socket.socket) -> None:
        """Open a stream and connect it with the socket `far`, whose ownership passes to the stream.

        Raises PeerUnreachable, ProtocolNotSupported.
        """
        assert self._nursery is not None
        try:
            stream = await self._new_stream(peer, protocol)
        except ProtocolNotSupported:
            raise
        except PeerUnreachable:
            with contextlib.suppress(*STREAM_ERRORS):  # a broken connection is sometimes detected only when it is used
                await self._host.disconnect(_id(peer))
            stream = await self._new_stream(peer, protocol)
        self._nursery.start_soon(pump, stream, far)

    async def _new_stream(self, peer: PeerId, protocol: str) -> Any:
        with _translated_errors(peer):
            await self._find(peer)
            with trio.fail_after(POLICY.dial_timeout_s):
                return await self._host.new_stream(_id(peer), [protocol])

    async def accept(self, protocol: str, path: Path) -> None:
        """See `host.HostControl.accept_streams`."""
        self._host.set_stream_handler(protocol, functools.partial(_deliver, protocol, path))

    async def _find(self, peer: PeerId) -> None:
        """Ensure a connection to a peer whose addresses the DHT may find."""
        target = _id(peer)
        if self._host.is_peer_connected(target):
            return
        with trio.fail_after(POLICY.dial_timeout_s):
            info = await self._kad.find_peer(target)
        if info is None or not info.addrs:
            raise PeerUnreachable(f"no address of {peer} was found")
        await self._dial(info)

    async def _dial(self, info: Any) -> None:
        self._host.get_network().unblock_peer(info.peer_id)  # our callers have a backoff of their own
        with trio.fail_after(POLICY.dial_timeout_s):
            await self._host.connect(info)

    async def _join(self) -> None:
        """Raises PeerUnreachable if there are peers to join and none answers."""
        for address in self._options.peers:
            with contextlib.suppress(PeerUnreachable):
                await self.connect(address.rpartition("/p2p/")[2], (address,))
        if self._options.peers and not self._host.get_connected_peers():
            raise PeerUnreachable(f"none of the peers to join answered: {', '.join(self._options.peers)}")


async def _run_call(
    scope: trio.CancelScope, work: Callable[[], Awaitable[_T]], on_done: Callable[[_T | NetworkError], None]
) -> None:
    result: _T | NetworkError = NetworkError("py-libp2p broke off")
    try:
        with scope:
            result = await work()
    except NetworkError as error:
        result = error
    finally:
        on_done(result)


async def pump(stream: Any, far: socket.socket) -> None:
    """Copy bytes both ways between a libp2p stream and a socket until both have ended, or one has failed."""
    far.setblocking(False)
    local = trio.SocketStream(trio.socket.from_stdlib_socket(far))
    try:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for copy in (_copy_out, _copy_in):
                    nursery.start_soon(_copy_until_end, copy(stream, local), scope)
    finally:
        deadline = trio.current_time() + POLICY.half_close_timeout_s
        with trio.CancelScope(shield=True, deadline=deadline), contextlib.suppress(*STREAM_ERRORS):
            await local.aclose()
            await stream.reset()


async def _copy_until_end(copy: Awaitable[None], scope: trio.CancelScope) -> None:
    """Run one direction; when it has ended, limit the time of the other."""
    try:
        await copy
    except STREAM_ERRORS as error:
        logger.debug("a stream broke: %s", error)
        scope.cancel()
    scope.deadline = min(scope.deadline, trio.current_time() + POLICY.half_close_timeout_s)


async def _copy_out(stream: Any, local: trio.SocketStream) -> None:
    while data := await local.receive_some(POLICY.copy_buffer):
        await stream.write(bytes(data))
    await stream.close_write()


async def _copy_in(stream: Any, local: trio.SocketStream) -> None:
    with contextlib.suppress(lp.StreamEOF):
        while data := await stream.read(POLICY.copy_buffer):
            await local.send_all(data)
    await local.send_eof()


async def _deliver(protocol: str, path: Path, stream: Any) -> None:
    """Connect a stream that a peer opened with the unix socket `path`, after a preamble with the peer."""
    peer = stream.muxed_conn.peer_id
    remote = stream.get_remote_address()
    kind = "ip6" if remote and ":" in remote[0] else "ip4"
    address = Multiaddr(f"/{kind}/{remote[0]}/tcp/{remote[1]}").to_bytes() if remote else b""
    preamble = pb.StreamInfo(peer=peer.to_bytes(), addr=address, proto=protocol).SerializeToString()
    far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        far.setblocking(False)
        local = trio.socket.from_stdlib_socket(far)
        await local.connect(str(path))
        await trio.SocketStream(local).send_all(bytes([len(preamble)]) + preamble)
    except OSError as error:
        logger.debug("no listener for streams of %s: %s", protocol, error)
        far.close()
        await stream.reset()
        return
    await pump(stream, far)


async def _suppress_errors(handle: Callable[[Any], Awaitable[None]], stream: Any) -> None:
    """Run a stream handler; py-libp2p would end the whole host when it fails."""
    try:
        await handle(stream)
    except* STREAM_ERRORS as errors:
        logger.debug("a stream failed: %s", errors.exceptions)


@contextlib.contextmanager
def _translated_errors(peer: PeerId) -> Iterator[None]:
    """Raises PeerUnreachable for the errors of py-libp2p and trio."""
    try:
        yield
    except NetworkError:
        raise
    except STREAM_ERRORS as error:
        if "protocols not supported" in str(error.__cause__):
            raise ProtocolNotSupported(f"{peer} accepts no streams of this protocol") from None
        text = str(error) or type(error).__name__
        raise PeerUnreachable(f"cannot reach {peer}: {text.splitlines()[0]}") from None


def _make_host(identity: Identity, listen: Sequence[Multiaddr], advertised: Sequence[Multiaddr] | None) -> Any:
    private = lp.Ed25519PrivateKey.from_bytes(identity.to_bytes()[4:36])
    key = lp.KeyPair(private, private.get_public_key())
    noise = lp.Noise(key, noise_privkey=lp.new_noise_key().private_key)
    return lp.new_host(
        key_pair=key,
        sec_opt={lp.NOISE: noise},  # without this it would accept plaintext
        muxer_opt={lp.YAMUX: lp.Yamux},
        listen_addrs=listen,
        announce_addrs=advertised,
        addrs_factory=None if advertised else _expand_unspecified,
    )


def _expand_unspecified(addresses: Sequence[Multiaddr]) -> list[Multiaddr]:
    """`/ip4/0.0.0.0/tcp/4001` as one address for each network interface."""
    found: list[Multiaddr] = []
    for address in map(str, addresses):
        _, kind, host, rest = address.split("/", 3)
        if not ipaddress.ip_address(host).is_unspecified:
            found.append(Multiaddr(address))
            continue
        own = (entry.address for entries in psutil.net_if_addrs().values() for entry in entries)
        found += [Multiaddr(f"/{kind}/{ip}/{rest}") for ip in own if _is_routable(kind, ip)]
    return found


def _is_routable(kind: str, host: str) -> bool:
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


def _check_ports(listen: Sequence[str]) -> None:
    """Raises AddressInUse, UsageError: py-libp2p would only log it, or share the port with its owner."""
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


def _dialable(addresses: Iterable[str], peer: PeerId) -> Iterable[Multiaddr]:
    """The well-formed ones that plain TCP can dial."""
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
