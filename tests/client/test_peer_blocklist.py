"""Who is left out, and until when."""

from __future__ import annotations

import pytest

from swarm.errors import ConnectionLost, NetworkError, NodeBusy, RemoteError
from swarm.types import NodeProfile, NodeState
from swarm_client.routing.blocklist import RECOVERY_GRACE_S, REFUSAL_S, SLOW_S, PeerBlocklist, StragglerEvicted


def node(published_at: float = 0.0) -> NodeProfile:
    return NodeProfile("a", "", NodeState.SERVING, "fp32", "h", 1, published_at=published_at)


@pytest.mark.parametrize(
    ("cause", "until"),
    [
        (NodeBusy("full", "a", 2.5), 2.5),
        (RemoteError("broken", "model", "a"), REFUSAL_S),
        (StragglerEvicted("slow"), SLOW_S),
        (RemoteError("forgotten", "unknown_session", "a"), 0.0),
    ],
)
def test_bans_of_nodes_that_live_end_by_themselves(cause: NetworkError, until: float) -> None:
    bans = PeerBlocklist()
    bans.add("a", cause, now=10.0, wall=1000.0)
    assert bool(bans.of([node(2000.0)], now=10.0 + until - 0.1)) == (until > 0)
    assert not bans.of([node(2000.0)], now=10.0 + until)


def test_a_lost_node_is_back_when_it_publishes_again() -> None:
    bans = PeerBlocklist()
    bans.add("a", ConnectionLost("gone"), now=10.0, wall=1000.0)
    assert bans.of([node(1000.0 + RECOVERY_GRACE_S)], now=1e6) == {"a"}
    bans.add("a", ConnectionLost("gone"), now=20.0, wall=1010.0)  # the same loss, noticed twice
    assert not bans.of([node(1000.1 + RECOVERY_GRACE_S)], now=21.0)
    assert not bans.of([node()], now=22.0)


def test_a_slow_node_is_better_than_none() -> None:
    bans = PeerBlocklist()
    bans.add("a", StragglerEvicted("slow"), now=0.0, wall=0.0)
    assert bans.of([node()], now=1.0) == {"a"}
    assert not bans.of([node()], now=1.0, and_slow=False)
    assert bans.of([node()], now=2.0) == {"a"}
