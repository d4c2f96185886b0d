"""A few rounds of `process_chaos`; `make chaos` has the many."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from process_chaos import private_home, run

from swarm_kernels.models.source import ModelSource


@pytest.mark.processes
@pytest.mark.real_model
def test_killed_nodes_cost_time_and_no_token(tmp_path: Path, real_model: ModelSource) -> None:
    rounds = asyncio.run(run(private_home(tmp_path), rounds=2, minutes=10.0, kinds=("kill",), seed=1))
    assert all(r.same_tokens for r in rounds)
    assert all(r.repairs >= 1 for r in rounds)
