"""hivemind's p2p daemon, a Go program on libp2p, as a child process.

Owns the process: it is started, supervised, restarted if it dies, and ended by `stop`, whatever is cancelled in
between. It is killed with us, however we end. Requests go through `control`.

A restarted daemon has the identity and the ports of the first one, and no connection: those who share it are notified
(`on_down`, `on_up`) and connect again.
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
from swarm.net.libp2p.policy import GoDaemonPolicy
from swarm.net.libp2p.socket_dir import SocketDir
from swarm.net.security.identity import Identity

logger = logging.getLogger(__name__)

POLICY = GoDaemonPolicy()
PR_SET_PDEATHSIG = 1
_KEY = "identity"


class GoDaemonHost:
    """`await GoDaemonHost.start(...)`; then use its `control`; then `await stop()`.

    `failed` is set when it has died and cannot be restarted; `reason` says why.
    """

    def __init__(self, identity: Identity, options: HostOptions) -> None:
        """Raises NetworkError when there is no room for its sockets."""
        self._identity = identity
        self._options = options
        self._socket_dir = SocketDir()
        self._folder = self._socket_dir.path
        self.control = GoDaemonControl(self._folder / "control")
        self.inbound = self._folder / "inbound"  # for the socket to which it delivers streams
        self.addresses: tuple[str, ...] = ()
        self.failed = asyncio.Event()
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks = TaskSet("p2p daemon")
        self._liveness: FramedStream | None = None
        self._ready = asyncio.Event()  # it has started, or has exited
        self._exited = asyncio.Event()
        self._serving = False  # it has started, so that an exit means a restart
        self._stopping = False
        self._output: deque[str] = deque(maxlen=6)  # its last lines
        self._crashes: deque[float] = deque(maxlen=POLICY.max_crashes)  # loop times
        self._on_down: list[Callable[[], None]] = []
        self._on_up: list[Callable[[], Awaitable[None]]] = []

    @classmethod
    async def start(cls, identity: Identity, options: HostOptions | None = None) -> GoDaemonHost:
        """Raises UsageError, AddressInUse, IdentityError, PeerUnreachable (of `peers`, none answered), NetworkError."""
        options = options or HostOptions()
        self = cls(identity, options)
        try:
            async with asyncio.timeout(POLICY.start_timeout_s):
                await self._launch(options)
        except TimeoutError:
            await self.stop()
            raise NetworkError(
                f"the p2p daemon did not start within {POLICY.start_timeout_s:g} s: {self.reason}"
            ) from None
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
        """The daemon's last lines of output."""
        return " / ".join(self._output) or "it wrote nothing"

    async def hivemind_p2p(self) -> P2P:
        """hivemind's own connection to the daemon, for its `DHTNode`."""
        return await P2P.replicate(HivemindMultiaddr(f"/unix{self.control.path}"))

    async def refresh(self) -> None:
        """Query again where we can be dialled: NAT mappings and relays appear late. Raises NetworkError."""
        _, self.addresses = await self.control.identify()

    def on_down(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the daemon has died: every connection through it is lost."""
        self._on_down.append(callback)

    def on_up(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Await `callback` whenever it has been restarted, in the order of registration."""
        self._on_up.append(callback)

    async def stop(self) -> None:
        """End the process and reap it, even if cancelled meanwhile. Idempotent."""
        self._stopping = True
        try:
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLICY.stop_timeout_s):
                        await self._exited.wait()
        finally:
            self._tasks.cancel()
            if self._liveness is not None:
                self._liveness.abort()
            self._reap()

    async def _launch(self, options: HostOptions) -> None:
        """Start a process and wait until it is ready. Raises as `start`."""
        _check_ports(options.listen)
        self._ready.clear()
        self._exited.clear()
        self.control.path.unlink(missing_ok=True)
        self._process = self._spawn(options)
        self._tasks.start(self._read_output(self._process), "output")
        await self._ready.wait()
        (self._folder / _KEY).unlink(missing_ok=True)  # it has been read, and must not be left behind by a crash
        if self._exited.is_set():
            raise _start_error(self.reason, options)
        self._liveness = await self.control.liveness_stream()
        peer, self.addresses = await self.control.identify()
        if peer != self._identity.peer:
            raise NetworkError(f"the p2p daemon runs as {peer} instead of {self._identity.peer}")
        for requested in options.listen:
            port = _port(requested)
            if port and all(_port(address) != port for address in self.addresses):
                raise AddressInUse(f"cannot listen on {requested}: the port is taken; choose another, or use 0")
        if self._exited.is_set():
            raise _start_error(self.reason, options)

    async def _check_health(self) -> None:
        """Kill a daemon that runs but does not answer, so that it is restarted."""
        missed, clock = 0, asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(POLICY.health_interval_s if not missed else 0.0)
            sent = clock()
            try:
                async with asyncio.timeout(POLICY.health_timeout_s):
                    await self.control.identify()
                missed = 0
            except TimeoutError:
                missed += clock() - sent < 1.5 * POLICY.health_timeout_s  # or else our own loop was late
            except NetworkError:
                missed = 0  # it is dead or starting: `_read_output` and `_restart` handle that
            if missed > 1 and self._serving and self._process is not None:
                logger.warning("the p2p daemon does not answer; ending it")
                self._process.kill()
                missed = 0

    async def _restart(self) -> None:
        """Restart a daemon that died, with its identity and its ports; set `failed` if that is not possible."""
        logger.warning("the p2p daemon has died: %s; restarting it", self.reason)
        self._kill()
        for notify_down in self._on_down:
            notify_down()
        now = asyncio.get_running_loop().time()
        crash_loop = len(self._crashes) == POLICY.max_crashes and now - self._crashes[0] < POLICY.crash_window_s
        self._crashes.append(now)
        # No peers: they may be gone by now, and it would refuse to start without them.
        same = replace(self._options, listen=same_ports(self._options.listen, self.addresses), peers=())
        backoff = () if crash_loop else POLICY.restart_backoff_s
        for number, pause_s in enumerate(backoff, start=1):
            await asyncio.sleep(pause_s)
            options = same if number < len(backoff) else replace(same, listen=self._options.listen)
            try:
                async with asyncio.timeout(POLICY.restart_timeout_s):
                    await self._launch(options)
                    for notify_up in self._on_up:
                        await notify_up()
            except (SwarmError, TimeoutError) as error:
                logger.warning("the p2p daemon could not be restarted (try %d): %s", number, error)
                self._kill()
                continue
            if self._exited.is_set():
                continue
            self.restarts += 1
            self._serving = True
            return
        logger.error("the p2p daemon is dead for good: %s", self.reason)
        self.failed.set()

    def _spawn(self, options: HostOptions) -> subprocess.Popen[bytes]:
        """Not by asyncio's subprocesses, which could lose the child to a cancellation."""
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
                start_new_session=True,  # Ctrl-C is for us: we may want to drain before the network stops
                preexec_fn=_die_with_parent if _libc is not None else None,
            )
        except OSError as error:
            raise NetworkError(f"cannot run hivemind's p2p daemon: {error.strerror}; reinstall hivemind") from None

    def _reap(self) -> None:
        self._kill()
        self._socket_dir.remove()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _command(self, key: Path, options: HostOptions) -> list[str]:
        public = not all(map(is_loopback, options.listen))
        command = [
            str(P2PD),
            f"-listen=/unix{self.control.path}",
            f"-id={key}",
            f"-hostAddrs={','.join(options.listen)}",
            "-dhtServer=1",
            "-relay=1",
            *_relay_flags(options),
            f"-autonat={int(public)}",
            f"-natPortMap={int(public)}",
            "-connManager=1",
            "-idleTimeout=30s",
        ]
        if options.advertise:
            command.append(f"-announceAddrs={','.join(options.advertise)}")
        if options.peers:
            command += ["-b=1", f"-bootstrapPeers={','.join(options.peers)}"]
        return command

    async def _read_output(self, process: subprocess.Popen[bytes]) -> None:
        """Read the daemon's output until it ends, which is when the process has died."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
        try:
            while line := await reader.readline():
                text = line.decode(errors="replace").strip()
                logger.debug("p2pd: %s", text)
                self._output.append(text)
                if text.startswith("Peer ID:"):
                    self._ready.set()
        finally:
            pipe.close()
            self._exited.set()
            self._ready.set()
            if self._serving and not self._stopping:
                self._serving = False
                self._tasks.start(self._restart(), "restart")


def _relay_flags(options: HostOptions) -> list[str]:
    if options.relay_server:
        caps = (
            f"-relayDataLimit={POLICY.relay_data_limit}",
            f"-relayMaxCircuits={POLICY.relay_max_circuits}",
            f"-relayMaxReservations={POLICY.relay_max_reservations}",
            f"-relayTimeLimit={POLICY.relay_time_limit}",
        )
        return ["-relayService=1", "-forceReachabilityPublic=1", *caps]
    if options.relays:
        trusted = f"-trustedRelays={','.join(options.relays)}"
        return ["-relayService=0", "-autoRelay=1", "-relayDiscovery=0", "-forceReachabilityPrivate=1", trusted]
    return ["-relayService=0"]


def _check_ports(listen: Sequence[str]) -> None:
    """Daemons would share a TCP port and accept each other's connections. Raises AddressInUse."""
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


def _start_error(output: str, options: HostOptions) -> NetworkError | AddressInUse | UsageError:
    if "address already in use" in output:
        return AddressInUse(
            f"cannot listen on {', '.join(options.listen)}: the port is taken; choose another, or 0 for any"
        )
    if "cannot assign requested address" in output:
        return UsageError(f"cannot listen on {', '.join(options.listen)}: this machine has no such address")
    if "bootstrap" in output:
        return PeerUnreachable(f"none of the peers to join answered: {', '.join(options.peers)}")
    return NetworkError(f"the p2p daemon did not start: {output}")


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
