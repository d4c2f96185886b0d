"""Drafts of the tail at the client: who is asked for what, which are taken, and when they end."""

from __future__ import annotations

import pytest

from swarm.errors import ProtocolError
from swarm.planner.generation.state_machine import SendStep
from swarm.tap_messages import TailDraft, TapRows, WireTaps
from swarm.types import Chain, Hop, NodeProfile, NodeState, OfferedDrafter
from swarm_client.session.edge_relay import EdgeRelay
from swarm_client.session.session_drafts import SessionDrafts, TailAsk
from swarm_client.speculation.drafters.tail import TailDrafter

CHAIN = Chain((Hop("a", 0, 2), Hop("b", 2, 4), Hop("c", 4, 6), Hop("d", 6, 8)))
OFFERED = OfferedDrafter("eagle", "x", b"f" * 16, (3, 5, 8))
ASK = TailAsk(OFFERED, 64, 100, nodes=4, depth=3)


def draft(step: int, position: int = 10, token: int = 5) -> TailDraft:
    return TailDraft(bytes(16), 0, step, position, [token], [-1], [20], 1500)


def sending(count: int, ask: TailAsk | None = ASK) -> SessionDrafts:
    drafts = SessionDrafts(None, ask)
    drafts.begin(200)
    for step in range(count):
        drafts.sent(SendStep(0, step, 0, (1,), True))
    return drafts


def test_hops_before_the_first_tap_carry_nothing_and_those_after_it_send_on() -> None:
    drafts = sending(0)
    asked = [drafts.asked_of(hop, tail=hop.end == 8) for hop in CHAIN.hops]
    assert asked == [
        None,
        WireTaps([3], 8, 72, onward=True),
        WireTaps([5], 8, 72, onward=True),
        WireTaps([8], 8, 72, draft=ASK.wire),
    ]
    drafts.begin(230, committed=220)
    assert drafts.asked_of(CHAIN.hops[1], tail=False) == WireTaps([3], 8, 220, onward=True)
    assert SessionDrafts(None).asked_of(CHAIN.hops[3], tail=True) is None


def test_a_draft_is_taken_once_and_only_for_the_text_that_is_known() -> None:
    drafts = sending(3)
    drafts.add(CHAIN, "d", draft(0), b"")
    taken = drafts.take_draft(10)
    assert taken is not None
    assert (taken.children, taken.took_ms) == ({(): ((5, -0.2),)}, 1.5)
    assert drafts.take_draft(10) is None
    drafts.add(CHAIN, "d", draft(2), b"")
    taken = drafts.take_draft(11)
    assert taken is not None
    assert (taken.children, taken.took_ms) == ({}, 1.5)


@pytest.mark.parametrize(
    ("peer", "message", "body"),
    [
        ("c", draft(0), b""),
        ("d", draft(3), b""),
        ("d", draft(0), b"x"),
        ("d", draft(0, token=100), b""),
        ("d", TapRows(bytes(16), 0, 0, 8), b"x" * 66),
    ],
    ids=["another hop", "a step to come", "with a body", "no token", "taps"],
)
def test_what_was_not_asked_for_costs_a_hop_its_place(peer: str, message: TailDraft | TapRows, body: bytes) -> None:
    drafts = sending(3)
    with pytest.raises(ProtocolError):
        drafts.add(CHAIN, peer, message, body)


def test_drafts_out_of_turn_and_of_sessions_that_asked_for_none_are_refused() -> None:
    drafts = sending(3)
    drafts.add(CHAIN, "d", draft(1), b"")
    for step in (0, 1):
        with pytest.raises(ProtocolError):
            drafts.add(CHAIN, "d", draft(step), b"")
    with pytest.raises(ProtocolError):
        sending(3, None).add(CHAIN, "d", draft(0), b"")


def test_another_tail_drafts_on_if_it_holds_the_same_drafter() -> None:
    def node(offered: OfferedDrafter | None) -> NodeProfile:
        return NodeProfile("e", "", NodeState.SERVING, "bf16", "h", 4, drafter=offered)

    drafts = sending(3)
    assert not drafts.left_by(node(OfferedDrafter("eagle", "renamed", b"f" * 16, (3, 5, 8))))
    assert drafts.tail is ASK
    assert drafts.left_by(node(OfferedDrafter("eagle", "x", b"g" * 16, (3, 5, 8))))
    assert drafts.tail is None
    assert not drafts.left_by(None)  # it has ended already
    drafts.add(CHAIN, "d", draft(1), b"")  # that was under way
    assert drafts.take_draft(10) is None


def test_an_edge_that_the_client_relays_carries_taps_too() -> None:
    from swarm.tap_messages import CarriedTaps
    from swarm_client.network.session_demux import ReceivedMessage

    relay = EdgeRelay(None, "bf16")
    taps = CarriedTaps(bytes(16), 0, 4, [3])
    incoming = ReceivedMessage("b", taps, b"rows")
    with pytest.raises(ProtocolError):
        relay.onward(CHAIN.peers, incoming, taps)
    relay.opened("b", relays=True)
    assert relay.onward(CHAIN.peers, incoming, taps) == ("c", taps)


def test_the_tree_goes_on_below_what_came_true() -> None:
    drafter = TailDrafter()
    drafter.reset([1, 2])
    drafter.extend([3])
    assert drafter.propose([], 4) == []
    drafter.set_tail_draft({(): ((4, -0.1), (5, -2.0)), (4,): ((6, -0.3),), (4, 6): ((7, -0.4),), (5,): ((8, -1.0),)})
    assert [token for token, _ in drafter.propose([], 1)] == [4]
    assert drafter.propose([4, 6], 4) == [(7, -0.4)]
    drafter.extend([4])
    assert drafter.propose([], 4) == [(6, -0.3)]
    drafter.extend([9])
    assert drafter.propose([], 4) == []
    assert drafter.acceptance.observed > 0
