"""Which steps a hop runs, skips, rolls back for and refuses, by what it has committed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from node_fakes import ROWS

from swarm.codec import Buffer
from swarm.errors import ContextOverflow, ProtocolError
from swarm.messages import AnyMessage, DropInFlight, OpenSession, Reroute, Step
from swarm_hop.serving.session import HopSession, InboundStep

ID = b"s" * 16


class Silent:
    """A connection to `peer` on which nothing is said."""

    def __init__(self, peer: str = "client") -> None:
        self.peer = peer

    async def send(self, message: AnyMessage, body: Buffer = b"") -> None:
        raise AssertionError("a session sends nothing itself")


def hop(committed: int = 0, epoch: int = 0, **options: object) -> HopSession:
    session = HopSession.of(
        OpenSession(ID, "toy", "hash", "fp32", 0, 2, 50, downstream="next", **options), Silent(), 0, ROWS
    )  # type: ignore[arg-type]
    session.committed, session.epoch, session.ran_epoch = committed, epoch, epoch
    return session


def step(base: int, line: int = 1, commit: Sequence[int] = (), epoch: int = 0, tree: int = 0) -> Step:
    slots = list(range(10, 10 + tree))
    return Step(
        ID, epoch, 0, base, line, tokens=[1] * (line + tree), parents=[-1] * tree, slots=slots, commit_slots=[*commit]
    )


@pytest.mark.parametrize(
    ("held", "arriving", "base", "commit", "after"),
    [
        (4, step(4), 4, [], 5),
        (4, step(4, commit=[1, 2]), 4, [1, 2], 7),
        (5, step(4, commit=[1, 2]), 5, [2], 7),  # it has committed slot 1 already
        (6, step(4, commit=[1, 2]), 6, [], 7),
        (6, step(4, line=0, tree=1, commit=[1, 2]), 6, [], 6),
        (9, step(4, commit=[1, 2], epoch=1), 6, [], 7),  # a new epoch takes the rest back
        (9, step(0, line=3, epoch=1), 0, [], 3),
    ],
)
def test_what_a_hop_runs_of_a_step(held: int, arriving: Step, base: int, commit: list[int], after: int) -> None:
    session = hop(held)
    run = session.admit(arriving)
    assert (run.committed_before, run.commit_slots, session.committed) == (base, commit, after)
    assert (run.causal_rows, run.slots, run.tokens) == (arriving.causal_rows, arriving.slots, arriving.tokens)


@pytest.mark.parametrize("arriving", [step(5), step(5, epoch=1), step(3), step(1, commit=[1, 2])])
def test_steps_out_of_turn_are_refused_and_change_nothing(arriving: Step) -> None:
    session = hop(4)
    with pytest.raises(ProtocolError):
        session.admit(arriving)
    assert (session.committed, session.ran_epoch) == (4, 0)


def test_only_the_first_step_of_an_epoch_may_roll_back() -> None:
    session = hop(8)
    session.admit(step(5, epoch=3))
    with pytest.raises(ProtocolError):
        session.admit(step(4, epoch=3))
    session.admit(step(6, epoch=3))
    assert session.committed == 7


def test_a_step_beyond_the_reservation_is_refused() -> None:
    with pytest.raises(ContextOverflow):
        hop(48).admit(step(48, line=3))


def test_a_replay_is_not_forwarded_before_its_end() -> None:
    session = hop(replay_silent_until=6)
    first, second, third = step(0, line=4), step(4, line=2), step(6)
    for arriving, silent in ((first, True), (second, True), (third, False)):
        assert session.is_replay(session.admit(arriving)) is silent
    tree = hop(6, replay_silent_until=6)
    assert not tree.is_replay(tree.admit(step(6, line=0, tree=2)))


@pytest.mark.parametrize("arriving", [step(4, line=3), step(4, line=1, tree=1), step(4, line=0, tree=1)])
def test_no_step_may_be_on_both_sides_of_what_is_sent_on(arriving: Step) -> None:
    with pytest.raises(ProtocolError):
        hop(4, replay_silent_until=6).admit(arriving)


async def test_steps_from_before_a_reroute_are_dropped_without_a_violation() -> None:
    session = hop()
    session.upstream = "old"
    session.arrive("old", InboundStep(step(0), b""))
    session.redirect(Reroute(ID, 1, "new", "other"))
    assert isinstance(await session.next(), Reroute)
    session.previous_upstreams.append("old")
    session.upstream = "new"
    session.arrive("old", InboundStep(step(0, epoch=1), b""))
    session.arrive("new", InboundStep(step(0, epoch=1, line=2), b""))
    following = await session.next()
    assert isinstance(following, InboundStep)
    assert following.step.causal_rows == 2
    with pytest.raises(ProtocolError):
        session.arrive("untrusted", InboundStep(step(0, epoch=1), b""))


async def test_a_prune_drops_older_steps() -> None:
    session = hop()
    session.arrive("client", InboundStep(step(0), b""))
    session.prune(DropInFlight(ID, 2))
    session.arrive("client", InboundStep(step(0, line=2, epoch=2), b""))
    following = await session.next()
    assert isinstance(following, InboundStep)
    assert following.step.epoch == 2


@pytest.mark.parametrize("message", [Reroute(ID, 1), Reroute(ID, 1, "", "")])
def test_a_route_that_is_none_for_this_hop_is_refused(message: Reroute) -> None:
    with pytest.raises(ProtocolError):
        hop().redirect(message)
