"""When the record is published, and that nothing follows its withdrawal."""

from __future__ import annotations

import asyncio

import pytest
from virtual_clock import virtual_time, wall_clock

from swarm.config import Limits
from swarm.errors import NetworkError
from swarm.net.security.identity import Identity, verify
from swarm.records import decode
from swarm.types import NodeProfile, NodeState
from swarm_node.membership.policy import PublishPolicy
from swarm_node.membership.record_publisher import RecordPublisher

IDENTITY = Identity.from_seed(b"\1" * 32)
LIMITS = Limits(publish_interval_s=2.0)


class Board:
    """A directory that notes who wrote when."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.records: list[bytes] = []
        self.broken = False

    async def publish(self, record: bytes, model: str, expires_at: float) -> None:
        if self.broken:
            raise NetworkError("the directory is away")
        self.times.append(asyncio.get_running_loop().time())
        self.records.append(record)
        assert expires_at == wall_clock() + LIMITS.record_ttl_s

    async def read(self, model: str) -> dict[str, bytes]:
        return {}


def publisher_for(board: Board) -> RecordPublisher:
    def profile(now: float) -> NodeProfile:
        return NodeProfile(IDENTITY.peer, "n", NodeState.JOINING, "bf16", "h", 3, published_at=now)

    return RecordPublisher(board, IDENTITY.sign, "toy", 6, profile, LIMITS, clock=wall_clock)


@virtual_time
async def test_records_come_at_intervals_and_soon_after_a_change_but_not_in_floods() -> None:
    board = Board()
    publisher = publisher_for(board)
    running = asyncio.create_task(publisher.run())
    await asyncio.sleep(7.0)
    assert board.times == [0.0, 2.0, 4.0, 6.0]
    for _ in range(50):
        publisher.changed()
        await asyncio.sleep(0.01)
    after = [t for t in board.times if t > 6.0]
    assert 2 <= len(after) <= 0.5 / PublishPolicy().min_interval_s + 1
    assert after[0] - 7.0 < 0.05
    running.cancel()
    record = decode(board.records[-1], IDENTITY.peer, "toy", wall_clock(), verify)
    assert (record.state, record.layers) == (NodeState.JOINING, 6)


@virtual_time
async def test_a_directory_that_is_away_for_a_while_is_tried_again() -> None:
    board = Board()
    publisher = publisher_for(board)
    running = asyncio.create_task(publisher.run())
    await asyncio.sleep(1.0)
    board.broken = True
    await asyncio.sleep(10.0)
    assert publisher.failures > 2
    board.broken = False
    await asyncio.sleep(2.5)
    assert publisher.failures == 0
    assert len(board.times) >= 2
    running.cancel()


@virtual_time
async def test_nothing_is_published_after_the_withdrawal() -> None:
    board = Board()
    publisher = publisher_for(board)
    running = asyncio.create_task(publisher.run())
    await asyncio.sleep(0.1)
    board.broken = True
    await publisher.withdraw()  # even if the directory does not answer
    board.broken = False
    publisher.changed()
    await asyncio.sleep(10)
    assert len(board.times) == 1
    running.cancel()


@virtual_time
async def test_publish_until_ok_retries_until_the_directory_answers() -> None:
    board = Board()
    board.broken = True
    publishing = asyncio.create_task(publisher_for(board).publish_until_ok())
    await asyncio.sleep(3.5)
    assert not publishing.done()
    board.broken = False
    await publishing
    assert len(board.times) == 1
    board.broken = True
    with pytest.raises(NetworkError, match="away"):
        await publisher_for(board).publish_until_ok()
