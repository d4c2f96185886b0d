"""A hop is lost while the drafter is being asked: the question dies with the chain, and the generation goes on."""

from __future__ import annotations

import pytest

from swarm.planner.generation.events import StepDone
from swarm.planner.generation.state_machine import (
    ChainReady,
    GenerationRequest,
    GenerationState,
    HopLost,
    RepairChain,
    RequestDrafts,
    SendStep,
    SpeculationPolicy,
)


@pytest.mark.parametrize("in_flight", [1, 4])
def test_a_question_that_was_never_put_does_not_hold_up_the_next_chain(in_flight: int) -> None:
    generation = GenerationState(
        GenerationRequest((1, 2, 3), 20, reserved_tree_slots=64),
        SpeculationPolicy(max_tree_rows=4, max_depth_per_step=2, max_steps_in_flight=in_flight),
    )
    (step,) = (a for a in generation.handle(ChainReady(0)) if isinstance(a, SendStep))
    asked = generation.handle(StepDone(generation.epoch, step.step, (4,), ()))
    assert any(isinstance(action, RequestDrafts) for action in asked)
    # The driver could not send what came before the question, and forgets it.
    (repair,) = generation.handle(HopLost("a", "gone"))
    assert isinstance(repair, RepairChain)
    again = generation.handle(ChainReady(repair.committed))
    assert any(isinstance(action, SendStep | RequestDrafts) for action in again)
