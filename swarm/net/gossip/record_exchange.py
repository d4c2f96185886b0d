"""Questions for records on the links of a pool: matches answers with questions, and refuses those nobody asked for.

Owns the questions that wait. Knows neither which records there are nor whom to ask (`record_reader`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from typing import Protocol

import msgspec

from swarm.codec import Buffer
from swarm.errors import PeerUnreachable, ProtocolError
from swarm.gossip_messages import Records, RecordsQuery
from swarm.messages import AnyMessage
from swarm.net.gossip.policy import GossipPolicy
from swarm.types import PeerId


class RecordChannel(Protocol):
    """A link to a peer."""

    @property
    def peer(self) -> PeerId: ...

    async def send(self, message: AnyMessage, body: Buffer = b"") -> None: ...


class RecordExchange:
    def __init__(self, policy: GossipPolicy = GossipPolicy()) -> None:
        self._policy = policy
        self._waiting: dict[tuple[PeerId, int], asyncio.Future[Records]] = {}
        self._late: OrderedDict[tuple[PeerId, int], None] = OrderedDict()

    async def ask(self, link: RecordChannel, query: RecordsQuery, timeout_s: float) -> Records:
        """Send `query` under a nonce of its own. Raises PeerUnreachable without an answer in time, ConnectionLost."""
        key = (link.peer, secrets.randbits(53))
        answer: asyncio.Future[Records] = asyncio.get_running_loop().create_future()
        self._waiting[key] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await link.send(msgspec.structs.replace(query, nonce=key[1]))
                return await answer
        except TimeoutError:
            raise PeerUnreachable(f"{link.peer} did not say which nodes it knows within {timeout_s:g} s") from None
        finally:
            del self._waiting[key]
            if not answer.done() or answer.cancelled():
                self._late[key] = None
                if len(self._late) > self._policy.max_late:
                    self._late.popitem(last=False)

    def on_records(self, peer: PeerId, message: Records, body: Buffer = b"") -> None:
        """Raises ProtocolError if nobody asked `peer` for this."""
        if len(body):
            raise ProtocolError("records with a body")
        key = (peer, message.nonce)
        answer = self._waiting.get(key)
        if answer is not None and not answer.done():
            answer.set_result(message)
        elif key in self._late:
            del self._late[key]  # it was slow; not its fault
        else:
            raise ProtocolError("records that nobody asked for")
