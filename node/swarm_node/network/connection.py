"""This node's end of the network: a transport and its directory, over the p2p daemon or in memory.

Owns how they are started, and the check that the configured peers serve the same model.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from swarm.config import NodeConfig
from swarm.errors import NetworkError, PeerUnreachable, WrongModel, WrongSwarm
from swarm.messages import CloseSession, OpenSession, SessionFailed
from swarm.net.base.cpu_quota import core_part
from swarm.net.base.half_open import HandshakePolicy
from swarm.net.base.tasks import TaskSet
from swarm.net.base.tls_addresses import is_loopback
from swarm.net.base.transport import Directory, Transport
from swarm.net.libp2p.options import HostOptions
from swarm.net.pool.connection_pool import PoolPolicy
from swarm.net.pool.frame_budgets import FrameBudgetPolicy
from swarm.net.security.identity import Identity
from swarm.net.security.proof_of_work import OwnProof
from swarm.net.security.swarm_secret import SwarmSecret
from swarm.records import Sign
from swarm.types import ModelId, PeerId
from swarm_node.network import mdns_join

logger = logging.getLogger(__name__)

JOIN_RETRY_S = 0.3
PEER_CHECK_TIMEOUT_S = 5.0


async def _rebootstrap_none(addresses: Sequence[str]) -> int:
    return 0


async def _clock_ok() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Daemon:
    """The p2p daemon process, if there is one."""

    pid: Callable[[], int] = lambda: 0
    restarts: Callable[[], int] = lambda: 0


@dataclass(frozen=True, slots=True)
class NodeNetwork:
    """`failed` is set when the network is lost for good. `wall_clock`: dates the records. `remembers`: whether records
    are kept in a file.
    `identity_proof`: of work for our identity, empty until there is one. `links`: what peers may cost us.

    `rebootstrap(addresses)` reconnects the directory to these peers; `check_clock()` raises ClockSkew when ours is off.
    """

    transport: Transport
    directory: Directory
    sign: Sign
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    rebootstrap: Callable[[Sequence[str]], Awaitable[int]] = _rebootstrap_none
    check_clock: Callable[[], Awaitable[None]] = _clock_ok
    daemon: Daemon = Daemon()
    wall_clock: Callable[[], float] = time.time
    remembers: bool = False
    identity_proof: Callable[[], bytes] = bytes
    links: PoolPolicy = field(default_factory=PoolPolicy)


Connect = Callable[[NodeConfig], AbstractAsyncContextManager[NodeNetwork]]


@asynccontextmanager
async def over_daemon(config: NodeConfig) -> AsyncIterator[NodeNetwork]:
    """Start a p2p daemon, join the DHT of `config.peers` or begin a new one.

    Raises UsageError, IdentityError, AddressInUse, PeerUnreachable, NetworkError.
    """
    identity = Identity.load_or_create(config.identity) if config.identity else Identity.generate()
    options = HostOptions(
        listen=config.listen, peers=config.peers, relays=config.relay_via, relay_server=config.relay_server
    )
    secret = await asyncio.to_thread(SwarmSecret, config.secret) if config.secret else None
    await asyncio.to_thread(importlib.import_module, "swarm.net.dht.directory")  # slow; runs beside the measurement
    from swarm.net.dht.directory import DhtDirectory
    from swarm.net.transports.multi import MultiTransport

    part = core_part()
    async with AsyncExitStack() as stack:
        deadline = asyncio.get_running_loop().time() + config.join_timeout_s
        while True:
            try:
                async with AsyncExitStack() as attempt:
                    transport = await MultiTransport.start(
                        identity,
                        options,
                        direct=config.transport != "libp2p",
                        direct_port=config.direct_port,
                        secret=secret,
                        libp2p_impl=config.libp2p_impl,
                        handshakes=HandshakePolicy().for_part(part),
                    )
                    attempt.push_async_callback(transport.close)
                    directory = await DhtDirectory.start(transport.daemon, config.peers, secret=secret)
                    attempt.push_async_callback(directory.close)
                    stack.push_async_exit(attempt.pop_all())
                break
            except PeerUnreachable:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                await asyncio.sleep(JOIN_RETRY_S)
        if transport.direct_disabled_reason and config.transport != "libp2p":
            logger.warning(
                "no direct connections, so all traffic goes through the p2p daemon: %s",
                transport.direct_disabled_reason,
            )
        await stack.enter_async_context(mdns_join.advertise(config, secret, transport.addresses, directory.rebootstrap))
        process = transport.daemon.daemon
        proof = await stack.enter_async_context(_proving(identity, config))
        yield NodeNetwork(
            transport,
            directory,
            identity.sign,
            process.failed,
            directory.rebootstrap,
            directory.check_clock,
            Daemon(lambda: process.pid, lambda: process.restarts),
            remembers=True,
            identity_proof=lambda: proof.current,
            links=PoolPolicy(budgets=FrameBudgetPolicy().for_part(part)),
        )


@asynccontextmanager
async def _proving(identity: Identity, config: NodeConfig) -> AsyncIterator[OwnProof]:
    """Meanwhile, have a proof of work made for this identity; not where all members are trusted or on this machine."""
    proof = OwnProof(identity.peer, config.identity)
    if config.secret or all(map(is_loopback, config.listen)):
        yield proof
        return
    tasks = TaskSet("identity proof")
    tasks.start(proof.run(), "run")
    try:
        yield proof
    finally:
        await tasks.close()


async def check_peers(transport: Transport, peers: Sequence[str], served: ModelId) -> None:
    """Check that each of `peers` (multiaddrs) serves our model. Raises WrongModel with the peer's detail, and
    WrongSwarm if one belongs to another swarm.

    A peer that takes no sessions (a client, a node of another kind) is skipped.
    """
    for address in peers:
        peer = address.rpartition("/p2p/")[2]
        try:
            async with asyncio.timeout(PEER_CHECK_TIMEOUT_S):
                reply = await _probe(transport, peer, address, served)
        except WrongSwarm:
            raise
        except (NetworkError, TimeoutError) as error:
            logger.info("cannot check what %s serves: %s", address, error)
            continue
        if reply is not None and reply.error == WrongModel.code:
            raise WrongModel(f"the peer {address} does not serve what you ask for: {reply.detail}")


async def _probe(transport: Transport, peer: PeerId, address: str, served: ModelId) -> SessionFailed | None:
    """Open a session on no layers: every node refuses it, and a wrong model is refused first."""
    session = os.urandom(16)
    connection = await transport.dial(peer, (address,))
    try:
        await connection.send(
            OpenSession(session, served.model, served.weight_hash, served.dtype, start=0, end=0, max_tokens=0)
        )
        while True:
            message, _ = await connection.receive()
            if isinstance(message, SessionFailed) and message.session == session:
                return message
    finally:
        with contextlib.suppress(NetworkError):
            await connection.send(CloseSession(session))
        await connection.close()
