"""A hop is lost while the drafter is being asked: the question dies with the chain, and the generation goes on."""

from __future__ import annotations

import pytest

from swarm.planner.generation.events import StepSettled
from swarm.planner.generation.state_machine import (
    ChainReady,
    Draft,
    Generation,
    GenerationPlan,
    HopLost,
    Policy,
    RepairChain,
    SendStep,
)


@pytest.mark.parametrize("in_flight", [1, 4])
def test_a_question_that_was_never_put_does_not_hold_up_the_next_chain(in_flight: int) -> None:
    generation = Generation(GenerationPlan((1, 2, 3), 20, tree_room=64), Policy(rows=4, levels=2, in_flight=in_flight))
    (step,) = (a for a in generation.handle(ChainReady(0)) if isinstance(a, SendStep))
    asked = generation.handle(StepSettled(generation.epoch, step.step, (4,), ()))
    assert any(isinstance(action, Draft) for action in asked)
    # The driver could not send what came before the question, and forgets it.
    (repair,) = generation.handle(HopLost("a", "gone"))
    assert isinstance(repair, RepairChain)
    again = generation.handle(ChainReady(repair.settled))
    assert any(isinstance(action, SendStep | Draft) for action in again)
