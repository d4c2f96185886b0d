"""A hop is lost while a draft request is in flight: the request is dropped, and the generation continues."""

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
def test_a_dropped_draft_request_does_not_block_the_next_chain(in_flight: int) -> None:
    generation = GenerationState(
        GenerationRequest((1, 2, 3), 20, reserved_tree_slots=64),
        SpeculationPolicy(max_tree_rows=4, max_depth_per_step=2, max_steps_in_flight=in_flight),
    )
    (step,) = (a for a in generation.handle(ChainReady(0)) if isinstance(a, SendStep))
    actions = generation.handle(StepDone(generation.epoch, step.step, (4,), ()))
    assert any(isinstance(action, RequestDrafts) for action in actions)
    # The driver could not send the step before the request, and drops the request.
    (repair,) = generation.handle(HopLost("a", "gone"))
    assert isinstance(repair, RepairChain)
    again = generation.handle(ChainReady(repair.committed))
    assert any(isinstance(action, SendStep | RequestDrafts) for action in again)
