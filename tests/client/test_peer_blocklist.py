"""Which nodes are blocked, and until when."""

from __future__ import annotations

import pytest

from swarm.errors import ConnectionLost, NetworkError, NodeBusy, RemoteError
from swarm.types import NodeProfile, NodeState
from swarm_client.routing.blocklist import BlocklistPolicy, PeerBlocklist
from swarm_client.trust.failures import StragglerEvicted

POLICY = BlocklistPolicy()


def node(published_at: float = 0.0) -> NodeProfile:
    return NodeProfile("a", "", NodeState.SERVING, "fp32", "h", 1, published_at=published_at)


@pytest.mark.parametrize(
    ("cause", "until"),
    [
        (NodeBusy("full", "a", 2.5), 2.5),
        (RemoteError("broken", "model", "a"), POLICY.refusal_s),
        (StragglerEvicted("slow"), POLICY.slow_s),
        (RemoteError("forgotten", "unknown_session", "a"), 0.0),
    ],
)
def test_blocks_of_nodes_that_are_alive_expire(cause: NetworkError, until: float) -> None:
    blocklist = PeerBlocklist()
    blocklist.add("a", cause, now=10.0, wall=1000.0)
    assert bool(blocklist.of([node(2000.0)], now=10.0 + until - 0.1)) == (until > 0)
    assert not blocklist.of([node(2000.0)], now=10.0 + until)


def test_a_lost_node_is_back_when_it_publishes_again() -> None:
    blocklist = PeerBlocklist()
    blocklist.add("a", ConnectionLost("gone"), now=10.0, wall=1000.0)
    assert blocklist.of([node(1000.0 + POLICY.recovery_grace_s)], now=1e6) == {"a"}
    blocklist.add("a", ConnectionLost("gone"), now=20.0, wall=1010.0)  # the same loss, noticed twice
    assert not blocklist.of([node(1000.1 + POLICY.recovery_grace_s)], now=21.0)
    assert not blocklist.of([node()], now=22.0)


def test_a_slow_node_is_better_than_none() -> None:
    blocklist = PeerBlocklist()
    blocklist.add("a", StragglerEvicted("slow"), now=0.0, wall=0.0)
    assert blocklist.of([node()], now=1.0) == {"a"}
    assert not blocklist.of([node()], now=1.0, and_slow=False)
    assert blocklist.of([node()], now=2.0) == {"a"}
