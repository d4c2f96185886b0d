"""hivemind's p2p daemon, a Go program on libp2p, as a child process.

Owns the process: it is started, watched, started again if it dies, and gone after `stop`, whatever is cancelled in
between. It dies with us, be our own end ever so sudden. What it can do is asked through `control`.

A daemon that was started again has the identity and the ports of the first one, and no connection: who shares it is
told (`on_down`, `on_up`) and makes its own anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from swarm.errors import AddressInUse, NetworkError, PeerUnreachable, SwarmError, UsageError
from swarm.net.base.frame_stream import FramedStream
from swarm.net.base.tasks import TaskSet
from swarm.net.base.tls_addresses import is_loopback, listen_ip
from swarm.net.libp2p._hivemind import P2P, P2PD, HivemindMultiaddr
from swarm.net.libp2p.go_daemon_control import GoDaemonControl
from swarm.net.libp2p.options import HostOptions, same_ports
from swarm.net.libp2p.socket_dir import SocketDir
from swarm.net.security.identity import Identity

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0  # joining a swarm whose first peers do not answer takes long
STOP_TIMEOUT_S = 2.0
RESTART_TIMEOUT_S = 5.0
HEALTH_EVERY_S = 0.4
HEALTH_ANSWER_S = 0.75  # that a daemon may take to say who it is, twice: then it is frozen
RESTART_AFTER_S = (0.0, 0.5, 2.0)  # each try to bring a dead daemon back waits so long before
MAX_DEATHS = 5  # within DEATHS_WITHIN_S: then something is wrong that starting it again does not cure
DEATHS_WITHIN_S = 60.0
# What a relay lends at most: bytes each way and time of one relayed connection, connections of one peer, and peers.
# hivemind's daemon starts two relays, one with these limits and one with libp2p's own (128 kB, 2 minutes); the later of
# them answers. On several threads that is often the wrong one, on one thread the right one.
RELAY_BYTES = 1 << 30
RELAY_TIME_LIMIT = "30m"
RELAY_CIRCUITS = 16
RELAY_RESERVATIONS = 64
PR_SET_PDEATHSIG = 1
_KEY = "identity"


class GoDaemonHost:
    """`await GoDaemonHost.start(...)`; then ask its `control`; then `await stop()`.

    `failed` is set when it has died and cannot be brought back; `reason` says why.
    """

    def __init__(self, identity: Identity, options: HostOptions) -> None:
        """Raises NetworkError when there is no room for its sockets."""
        self._identity = identity
        self._options = options
        self._home = SocketDir()
        self._folder = self._home.path
        self.control = GoDaemonControl(self._folder / "control")
        self.inbound = self._folder / "inbound"  # for the socket to which it delivers streams
        self.addresses: tuple[str, ...] = ()
        self.failed = asyncio.Event()
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks = TaskSet("p2p daemon")
        self._liveness: FramedStream | None = None
        self._ready = asyncio.Event()  # it answers, or has ended
        self._ended = asyncio.Event()
        self._serving = False  # it has answered, and its death would be news
        self._stopping = False
        self._said: deque[str] = deque(maxlen=6)
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)  # loop times
        self._on_down: list[Callable[[], None]] = []
        self._on_up: list[Callable[[], Awaitable[None]]] = []

    @classmethod
    async def start(cls, identity: Identity, options: HostOptions | None = None) -> GoDaemonHost:
        """Raises UsageError, AddressInUse, IdentityError, PeerUnreachable (of `peers`, none answered), NetworkError."""
        options = options or HostOptions()
        self = cls(identity, options)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._launch(options)
        except TimeoutError:
            await self.stop()
            raise NetworkError(f"the p2p daemon did not start within {START_TIMEOUT_S:g} s: {self.reason}") from None
        except BaseException:
            await self.stop()
            raise
        self._serving = True
        self._tasks.start(self._check_health(), "health")
        return self

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def reason(self) -> str:
        """The daemon's last words."""
        return " / ".join(self._said) or "it said nothing"

    async def calls(self) -> P2P:
        """hivemind's own connection to the daemon, for its `DHTNode`."""
        return await P2P.replicate(HivemindMultiaddr(f"/unix{self.control.path}"))

    async def refresh(self) -> None:
        """Ask again where we can be dialled: routers and relays take their time. Raises NetworkError."""
        _, self.addresses = await self.control.identify()

    def on_down(self, tell: Callable[[], None]) -> None:
        """Call `tell` whenever the daemon has died: every connection through it is lost."""
        self._on_down.append(tell)

    def on_up(self, tell: Callable[[], Awaitable[None]]) -> None:
        """Await `tell` whenever it has been started again, those who asked first before the others."""
        self._on_up.append(tell)

    async def stop(self) -> None:
        """End the process and reap it, even if cancelled meanwhile. Idempotent."""
        self._stopping = True
        try:
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STOP_TIMEOUT_S):
                        await self._ended.wait()
        finally:
            self._tasks.cancel()
            if self._liveness is not None:
                self._liveness.abort()
            self._reap()

    async def _launch(self, options: HostOptions) -> None:
        """Start a process and wait until it answers. Raises as `start`."""
        _check_ports(options.listen)
        self._ready.clear()
        self._ended.clear()
        self.control.path.unlink(missing_ok=True)
        self._process = self._spawn(options)
        self._tasks.start(self._watch(self._process), "watch")
        await self._ready.wait()
        (self._folder / _KEY).unlink(missing_ok=True)  # it has been read, and should not outlive a sudden death
        if self._ended.is_set():
            raise _start_error(self.reason, options)
        self._liveness = await self.control.liveness_stream()
        peer, self.addresses = await self.control.identify()
        if peer != self._identity.peer:
            raise NetworkError(f"the p2p daemon runs as {peer} instead of {self._identity.peer}")
        for wanted in options.listen:
            port = _port(wanted)
            if port and all(_port(address) != port for address in self.addresses):
                raise AddressInUse(f"cannot listen on {wanted}: the port is taken; choose another, or use 0")
        if self._ended.is_set():
            raise _start_error(self.reason, options)

    async def _check_health(self) -> None:
        """A daemon that lives and does not answer is as good as dead: end it, so that it is started again."""
        missed, clock = 0, asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(HEALTH_EVERY_S if not missed else 0.0)
            asked = clock()
            try:
                async with asyncio.timeout(HEALTH_ANSWER_S):
                    await self.control.identify()
                missed = 0
            except TimeoutError:
                missed += clock() - asked < 1.5 * HEALTH_ANSWER_S  # or else it was us who were late
            except NetworkError:
                missed = 0  # it is dead, or about to answer again: `_watch` and `_restart` see to that
            if missed > 1 and self._serving and self._process is not None:
                logger.warning("the p2p daemon does not answer; ending it")
                self._process.kill()
                missed = 0

    async def _restart(self) -> None:
        """Bring a daemon that died back, with its identity and its ports; set `failed` if that cannot be done."""
        logger.warning("the p2p daemon has died: %s; starting it again", self.reason)
        self._kill()
        for tell in self._on_down:
            tell()
        now = asyncio.get_running_loop().time()
        hopeless = len(self._deaths) == MAX_DEATHS and now - self._deaths[0] < DEATHS_WITHIN_S
        self._deaths.append(now)
        # No peers: they may be gone by now, and it would refuse to start without them.
        same = replace(self._options, listen=same_ports(self._options.listen, self.addresses), peers=())
        tries = () if hopeless else RESTART_AFTER_S
        for number, pause_s in enumerate(tries, start=1):
            await asyncio.sleep(pause_s)
            options = same if number < len(tries) else replace(same, listen=self._options.listen)
            try:
                async with asyncio.timeout(RESTART_TIMEOUT_S):
                    await self._launch(options)
                    for again in self._on_up:
                        await again()
            except (SwarmError, TimeoutError) as error:
                logger.warning("the p2p daemon could not be started again (try %d): %s", number, error)
                self._kill()
                continue
            if self._ended.is_set():
                continue
            self.restarts += 1
            self._serving = True
            return
        logger.error("the p2p daemon is dead for good: %s", self.reason)
        self.failed.set()

    def _spawn(self, options: HostOptions) -> subprocess.Popen[bytes]:
        """Not asyncio's way of it: here is no moment at which a cancellation could lose the child."""
        key = self._folder / _KEY
        key.unlink(missing_ok=True)
        self._identity.save(key)
        one_thread = {"GOMAXPROCS": "1"} if options.relay_server else {}
        try:
            return subprocess.Popen(
                self._command(key, options),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "GOLOG_LOG_LEVEL": "error", **one_thread},
                start_new_session=True,  # Ctrl-C is for us: we may want to drain before the network goes
                preexec_fn=_die_with_parent if _libc is not None else None,
            )
        except OSError as error:
            raise NetworkError(f"cannot run hivemind's p2p daemon: {error.strerror}; reinstall hivemind") from None

    def _reap(self) -> None:
        self._kill()
        self._home.remove()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _command(self, key: Path, options: HostOptions) -> list[str]:
        outside = not all(map(is_loopback, options.listen))
        command = [
            str(P2PD),
            f"-listen=/unix{self.control.path}",
            f"-id={key}",
            f"-hostAddrs={','.join(options.listen)}",
            "-dhtServer=1",
            "-relay=1",
            *_relay_flags(options),
            f"-autonat={int(outside)}",
            f"-natPortMap={int(outside)}",
            "-connManager=1",
            "-idleTimeout=30s",
        ]
        if options.advertise:
            command.append(f"-announceAddrs={','.join(options.advertise)}")
        if options.peers:
            command += ["-b=1", f"-bootstrapPeers={','.join(options.peers)}"]
        return command

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Listen to what the daemon says until it says no more, which is when it is dead."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
        try:
            while line := await reader.readline():
                text = line.decode(errors="replace").strip()
                logger.debug("p2pd: %s", text)
                self._said.append(text)
                if text.startswith("Peer ID:"):
                    self._ready.set()
        finally:
            pipe.close()
            self._ended.set()
            self._ready.set()
            if self._serving and not self._stopping:
                self._serving = False
                self._tasks.start(self._restart(), "revive")


def _relay_flags(options: HostOptions) -> list[str]:
    if options.relay_server:
        caps = (
            f"-relayDataLimit={RELAY_BYTES}",
            f"-relayMaxCircuits={RELAY_CIRCUITS}",
            f"-relayMaxReservations={RELAY_RESERVATIONS}",
            f"-relayTimeLimit={RELAY_TIME_LIMIT}",
        )
        return ["-relayService=1", "-forceReachabilityPublic=1", *caps]
    if options.relays:
        trusted = f"-trustedRelays={','.join(options.relays)}"
        return ["-relayService=0", "-autoRelay=1", "-relayDiscovery=0", "-forceReachabilityPrivate=1", trusted]
    return ["-relayService=0"]


def _check_ports(listen: Sequence[str]) -> None:
    """Daemons would share a TCP port and take each other's callers. Raises AddressInUse."""
    for address in listen:
        host, port = listen_ip(address), _port(address)
        if host is None or not port or "/tcp/" not in address:
            continue
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise AddressInUse(
                        f"cannot listen on {address}: the port is taken; choose another, or use 0"
                    ) from None


def _start_error(said: str, options: HostOptions) -> NetworkError | AddressInUse | UsageError:
    if "address already in use" in said:
        return AddressInUse(
            f"cannot listen on {', '.join(options.listen)}: the port is taken; choose another, or 0 for any"
        )
    if "cannot assign requested address" in said:
        return UsageError(f"cannot listen on {', '.join(options.listen)}: this machine has no such address")
    if "bootstrap" in said:
        return PeerUnreachable(f"none of the peers to join answered: {', '.join(options.peers)}")
    return NetworkError(f"the p2p daemon did not start: {said}")


def _port(address: str) -> int:
    """The TCP or UDP port in a multiaddr, 0 if there is none."""
    parts = address.split("/")
    for kind, value in itertools.pairwise(parts):
        if kind in ("tcp", "udp") and value.isdigit():
            return int(value)
    return 0


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # looked up before any fork


def _die_with_parent() -> None:
    """In the child, before it becomes the daemon: be killed when the thread that started it ends."""
    assert _libc is not None
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
