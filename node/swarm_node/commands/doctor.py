"""`swarm-node doctor`: what would keep this machine from serving, and what to do about it.

Owns the checks and their sentences. It joins for a moment, as a client; the kernels are compiled if they never were.
"""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import json
import logging
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import psutil
from rich.console import Console

from swarm.config import NodeConfig, data_dir
from swarm.errors import ClockSkew, DeviceUnavailable, NetworkError, PeerUnreachable, SwarmError, WrongSwarm
from swarm.net.base.tls_addresses import is_relayed, listen_ip
from swarm.net.base.transport import Connection
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.identity import Identity
from swarm.net.security.swarm_secret import SwarmSecret
from swarm_node.network.swarm_reader import merged

if TYPE_CHECKING:
    from swarm.net.discovery.autonat import ReachabilityReport
    from swarm.net.transports.multi import MultiTransport

logger = logging.getLogger(__name__)

GB = 1e9
MIN_MEMORY = 1 * GB  # a node process with a few layers of a small model
MIN_DISK = 2 * GB
PROBE_TIMEOUT_S = 8.0
RELAY_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
MARKS = {"ok": "[green]ok     [/green]", "warning": "[yellow]warning[/yellow]", "broken": "[red]broken [/red]"}

Verdict = Literal["ok", "warning", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    verdict: Verdict
    sentence: str


async def run(config: NodeConfig) -> bool:
    """Print the findings as they come; whether nothing is broken."""
    healthy = True
    console = Console(highlight=False, soft_wrap=True)
    async for finding in examine(config):
        healthy = healthy and finding.verdict != "broken"
        if config.json:
            sys.stdout.write(json.dumps(asdict(finding)) + "\n")
        else:
            console.print(f"{MARKS[finding.verdict]} {finding.subject:<12} ", end="")
            console.print(finding.sentence, markup=False)
    return healthy


async def examine(config: NodeConfig) -> AsyncIterator[Finding]:
    """All checks, the cheap ones first."""
    yield memory(psutil.virtual_memory().available)
    yield disk(_free_disk())
    yield await asyncio.to_thread(gpu, config.gpu)
    yield await asyncio.to_thread(kernels)
    async with AsyncExitStack() as stack:
        try:
            transport = await _open(config, stack)
        except PeerUnreachable as error:  # it has dialled the relays only
            yield Finding("relay", "broken", str(error))
            return
        except SwarmError as error:
            yield Finding("ports", "broken", str(error))
            return
        yield ports(transport.addresses)
        yield reachability(transport.addresses)
        yield direct(transport.direct_disabled_reason)
        async for finding in _others(config, transport, stack):
            yield finding


def memory(available: float) -> Finding:
    if available < MIN_MEMORY:
        sentence = (
            f"only {available / GB:.1f} GB are free, too little for a node; close something or use another machine"
        )
        return Finding("memory", "broken", sentence)
    return Finding("memory", "ok", f"{available / GB:.1f} GB are free")


def disk(free: float) -> Finding:
    if free < MIN_DISK:
        sentence = f"only {free / GB:.1f} GB are free in {data_dir()}; free some, or set SWARM_HOME to another disk"
        return Finding("disk", "warning", sentence)
    return Finding("disk", "ok", f"{free / GB:.0f} GB are free for models")


def gpu(number: int | None) -> Finding:
    """Imports torch: seconds."""
    import torch

    from swarm_kernels.device.device import choose_device

    try:
        device = choose_device(number)
    except DeviceUnavailable as error:
        return Finding("gpu", "broken", str(error))
    if device.type == "cuda":
        return Finding("gpu", "ok", f"GPU {number} is a {torch.cuda.get_device_name(device)}")
    if torch.cuda.is_available():
        return Finding("gpu", "warning", "there is a GPU that lies idle; give --gpu 0 to compute on it")
    if shutil.which("nvidia-smi"):
        sentence = "there is an NVIDIA driver, but this PyTorch cannot use a GPU; install its CUDA build to do so"
        return Finding("gpu", "warning", sentence)
    return Finding("gpu", "ok", "none; a node computes on the CPU")


def kernels() -> Finding:
    """Compiles them on first use: up to a minute."""
    from swarm_kernels.ops import dispatch

    in_use = dispatch.describe()
    if dispatch.isa() == "reference":
        sentence = f"computes in {in_use}; install g++ or clang++, or it is several times slower on the CPU"
        return Finding("kernels", "warning", sentence)
    return Finding("kernels", "ok", in_use)


def ports(addresses: tuple[str, ...]) -> Finding:
    return Finding("ports", "ok", f"listens on {', '.join(a.partition('/p2p/')[0] for a in addresses)}")


def reachability(addresses: tuple[str, ...]) -> Finding:
    """By our own addresses only: whether a router lets others in is checked by `dialled_back`."""
    hosts = {ipaddress.ip_address(host) for a in addresses if (host := listen_ip(a)) is not None and not is_relayed(a)}
    if any(host.is_global for host in hosts):
        return Finding("reachability", "ok", "this machine has a public address; its firewall must let the ports in")
    if any(map(is_relayed, addresses)):
        return Finding("reachability", "ok", "no public address, but others reach this machine through a relay")
    if all(host.is_loopback for host in hosts):
        return Finding("reachability", "warning", "listens on this machine only; nobody else can reach it")
    return Finding(
        "reachability",
        "warning",
        "no public address: the home network reaches this machine, others only if its router forwards a port to it "
        "(then give --listen /ip4/0.0.0.0/tcp/PORT) or through a relay (--relay-via MADDR)",
    )


def direct(problem: str) -> Finding:
    if problem:
        return Finding("direct", "warning", f"no direct connections, so all goes through the p2p daemon: {problem}")
    return Finding("direct", "ok", "direct TLS connections work on this machine")


async def _open(config: NodeConfig, stack: AsyncExitStack) -> MultiTransport:
    """A transport that listens where the node would, and has joined no swarm yet. Raises SwarmError."""
    options = HostOptions(listen=config.listen, relays=config.relay_via, relay_server=config.relay_server)
    secret = await asyncio.to_thread(SwarmSecret, config.secret) if config.secret else None
    await asyncio.to_thread(importlib.import_module, "swarm.net.dht.directory")
    from swarm.net.transports.multi import MultiTransport

    transport = await MultiTransport.start(
        Identity.generate(),
        options,
        direct=config.transport != "libp2p",
        direct_port=config.direct_port,
        secret=secret,
        libp2p_impl=config.libp2p_impl,
    )
    stack.push_async_callback(transport.close)
    return transport


async def _others(config: NodeConfig, transport: MultiTransport, stack: AsyncExitStack) -> AsyncIterator[Finding]:
    """Checks that need other peers: relays, the peers to join, the clock, the directory."""
    for relay in config.relay_via:
        yield await _relay(transport, relay)
    if not config.peers:
        sentence = "none were given, so clock and directory are not checked; give --peer or --invite"
        yield Finding("peers", "warning", sentence)
        return
    checked = [await _peer(transport, address) for address in config.peers]
    for finding in checked:
        yield finding
    alive = [peer for peer, found in zip(config.peers, checked, strict=True) if found.verdict != "broken"]
    yield await _dialled_back(transport, alive)  # not by one of another swarm, which our direct port would refuse
    if alive:
        for finding in await _directory(config, transport, alive, stack):
            yield finding


async def _relay(transport: MultiTransport, relay: str) -> Finding:
    peer = relay.rpartition("/p2p/")[2]
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await transport.daemon.control.connect(peer, (relay,))
            (await transport.daemon.control.open_stream(peer, RELAY_PROTOCOL)).abort()
    except (TimeoutError, NetworkError):
        sentence = f"the relay {relay} does not answer, or is none: see that it runs, or choose another"
        return Finding("relay", "broken", sentence)
    return Finding("relay", "ok", f"{relay} relays")


async def _peer(transport: MultiTransport, address: str) -> Finding:
    peer = address.rpartition("/p2p/")[2]
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await (await transport.dial(peer, (address,))).close()
    except WrongSwarm as error:
        return Finding("peers", "broken", str(error))
    except (TimeoutError, PeerUnreachable):
        return Finding(
            "peers",
            "broken",
            f"{address} does not answer: it is not running, its port is closed to us, or the address is old",
        )
    return Finding("peers", "ok", f"{address} answers")


async def _dialled_back(transport: MultiTransport, peers: Sequence[str]) -> Finding:
    await transport.serve(_hang_up)
    for address in peers:
        try:
            return dialled_back(await transport.check_reachability(address.rpartition("/p2p/")[2]))
        except NetworkError as error:
            logger.info("%s could not dial back: %s", address, error)
    return Finding("dial-back", "warning", "no peer could dial this machine back; only its own addresses are known")


def dialled_back(verdict: ReachabilityReport) -> Finding:
    """Whether another peer could reach us."""
    if not verdict.observed:
        return Finding("dial-back", "warning", "this machine is reached through a relay; nobody dialled it directly")
    observed = ipaddress.ip_address(verdict.observed)
    where = "on this machine" if observed.is_loopback else "in the home network" if observed.is_private else "outside"
    ports = ", ".join(sorted({address.split("/")[4] for address in verdict.reached}))
    if verdict.reached and not verdict.missed:
        sentence = f"another peer {where} dialled {verdict.observed} and reached this machine (port {ports})"
        return Finding("dial-back", "ok", sentence)
    closed = ", ".join(sorted({address.split("/")[4] for address in verdict.missed}))
    if verdict.missed:
        reached = f"only port {ports}" if ports else "nothing"
        return Finding(
            "dial-back",
            "warning",
            f"another peer {where} dialled {verdict.observed} and reached {reached}: open port {closed} in the "
            "firewall, forward it in the router, or be reached through a relay (--relay-via MADDR)",
        )
    return Finding(
        "dial-back",
        "warning",
        f"others see this machine as {verdict.observed}, which is its router's address: forward a port there (then "
        "give --listen /ip4/0.0.0.0/tcp/PORT), or be reached through a relay (--relay-via MADDR)",
    )


async def _hang_up(connection: Connection) -> None:
    await connection.close()


async def _directory(
    config: NodeConfig, transport: MultiTransport, peers: list[str], stack: AsyncExitStack
) -> list[Finding]:
    from swarm.net.dht.directory import DhtDirectory

    secret = await asyncio.to_thread(SwarmSecret, config.secret) if config.secret else None
    try:
        directory = await DhtDirectory.start(transport.daemon, peers, client=True, secret=secret)
        stack.push_async_callback(directory.close)
        await directory.check_clock()
        found = await directory.read(config.model)  # the reader below passes over a directory that fails
        reader = await stack.enter_async_context(merged(config.model, peers, transport, directory))
        seen = [node.peer for node in (await reader.snapshot()).nodes]
    except ClockSkew as error:
        return [Finding("clock", "broken", str(error))]
    except NetworkError as error:
        return [Finding("directory", "broken", str(error))]
    clock = Finding("clock", "ok", "this machine's clock agrees with the others'")
    if not seen:
        sentence = f"answers, but nobody serves {config.model} yet; is it the right name?"
        return [clock, Finding("directory", "warning", sentence)]
    told = sum(peer not in found for peer in seen)
    others = f", {told} of which only other nodes told us of" if told else ""
    return [clock, Finding("directory", "ok", f"answers: {len(seen)} nodes of {config.model}{others}")]


def _free_disk() -> float:
    place = data_dir()
    while not place.exists():
        place = place.parent
    return float(shutil.disk_usage(place).free)
