"""hivemind's p2p daemon, a Go program on libp2p, as a child process.

Owns the process: it is started, watched, and gone after `stop`, whatever is cancelled in between. It ends by itself
when the connection that we hold to it breaks, so not even our own sudden death leaves it behind. What it can do is
asked through `control`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
import os
import shutil
import subprocess
import tempfile
from collections import deque
from pathlib import Path

from swarm.errors import AddressInUse, NetworkError, PeerUnreachable, UsageError
from swarm.net.daemon_options import DaemonOptions
from swarm.net.frame_stream import FrameStream
from swarm.net.hivemind_parts import P2PD
from swarm.net.identity import Identity
from swarm.net.p2pd_control import Control
from swarm.net.tasks import TaskScope

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0  # joining a swarm whose first peers do not answer takes long
STOP_TIMEOUT_S = 2.0
_KEY = "identity"
MAX_SOCKET_PATH = 80  # bytes of folder, so that the names of unix sockets in it stay under their 108


class P2PDaemon:
    """`await P2PDaemon.start(...)`; then ask its `control`; then `await stop()`. `failed` is set if it dies before."""

    def __init__(self, identity: Identity, options: DaemonOptions) -> None:
        self._identity = identity
        self._options = options
        place = None if len(tempfile.gettempdir()) <= MAX_SOCKET_PATH else "/tmp"
        self._folder = Path(tempfile.mkdtemp(prefix="swarm-", dir=place))  # 0700: nobody else may command the daemon
        self.control = Control(self._folder / "control")
        self.inbound = self._folder / "inbound"  # for the socket to which it delivers streams
        self.addresses: tuple[str, ...] = ()
        self.failed = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks = TaskScope("p2p daemon")
        self._lifeline: FrameStream | None = None
        self._ready = asyncio.Event()  # it answers, or has ended
        self._ended = asyncio.Event()
        self._stopping = False
        self._said: deque[str] = deque(maxlen=6)

    @classmethod
    async def start(cls, identity: Identity, options: DaemonOptions | None = None) -> P2PDaemon:
        """Raises UsageError, AddressInUse, PeerUnreachable (of `peers`, none answered), NetworkError."""
        options = options or DaemonOptions()
        self = cls(identity, options)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._start()
        except TimeoutError:
            await self.stop()
            raise NetworkError(f"the p2p daemon did not start within {START_TIMEOUT_S:g} s: {self.reason}") from None
        except BaseException:
            await self.stop()
            raise
        return self

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def reason(self) -> str:
        """The daemon's last words."""
        return " / ".join(self._said) or "it said nothing"

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
            if self._lifeline is not None:
                self._lifeline.abort()
            self._reap()

    async def _start(self) -> None:
        self._process = self._spawn()
        self._tasks.start(self._watch(self._process), "watch")
        await self._ready.wait()
        (self._folder / _KEY).unlink(missing_ok=True)  # it has been read, and should not outlive a sudden death
        if self.failed.is_set():
            raise _start_error(self.reason, self._options)
        self._lifeline = await self.control.lifeline()
        peer, self.addresses = await self.control.identify()
        if peer != self._identity.peer:
            raise NetworkError(f"the p2p daemon runs as {peer} instead of {self._identity.peer}")
        for wanted in self._options.listen:
            port = _port(wanted)
            if port and all(_port(address) != port for address in self.addresses):
                raise AddressInUse(f"cannot listen on {wanted}: the port is taken; choose another, or use 0")

    def _spawn(self) -> subprocess.Popen[bytes]:
        """Not asyncio's way of it: here is no moment at which a cancellation could lose the child."""
        key = self._folder / _KEY
        self._identity.save(key)
        try:
            return subprocess.Popen(
                self._command(key),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "GOLOG_LOG_LEVEL": "error"},
                start_new_session=True,  # Ctrl-C is for us: we may want to drain before the network goes
            )
        except OSError as error:
            raise NetworkError(f"cannot run hivemind's p2p daemon: {error.strerror}; reinstall hivemind") from None

    def _reap(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _command(self, key: Path) -> list[str]:
        options = self._options
        outside = not all(map(_is_loopback, options.listen))
        command = [
            str(P2PD),
            f"-listen=/unix{self.control.path}",
            f"-id={key}",
            f"-hostAddrs={','.join(options.listen)}",
            "-dhtServer=1",
            "-relay=1",
            f"-autonat={int(outside)}",
            f"-natPortMap={int(outside)}",
            "-connManager=1",
            "-idleTimeout=30s",
        ]
        if options.announce:
            command.append(f"-announceAddrs={','.join(options.announce)}")
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
            if not self._stopping:
                self.failed.set()
                logger.error("the p2p daemon has died: %s", self.reason)
            self._ended.set()
            self._ready.set()


def _start_error(said: str, options: DaemonOptions) -> NetworkError | AddressInUse | UsageError:
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


def _is_loopback(address: str) -> bool:
    parts = address.split("/")
    if len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
        return False
    try:
        return ipaddress.ip_address(parts[2]).is_loopback
    except ValueError:
        return False
