"""The compiled sweep against the plain one."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.planner.routing import dag as routing_dp
from swarm.planner.routing.dag import (
    INFINITE,
    REBUILD_PENALTY,
    Ints,
    LayerDag,
    compiled,
    relax_backward,
    relax_backward_plain,
)
from swarm.planner.routing.route import RouteNode, route
from swarm.planner.routing.traceback import trace_back


def random_dag(rng: np.random.Generator) -> tuple[LayerDag, Ints, Ints]:
    """-> (a DAG, entries, exits): spans with holes, links that are missing, rows that must not be entered or left."""
    layers, rows = int(rng.integers(1, 12)), int(rng.integers(1, 20))
    top = int(rng.choice([2, 9, 1 << 30]))

    def costs(*shape: int, missing: float) -> Ints:
        drawn: Ints = rng.integers(0, top, shape)
        drawn[rng.random(shape) < missing] = INFINITE
        return drawn

    tau, rho = costs(layers, rows, missing=0.3), costs(rows, rows, missing=rng.choice([0.0, 0.3]))
    np.fill_diagonal(rho, INFINITE)
    if rng.random() < 0.3:
        tau += np.where(rng.random(tau.shape) < 0.5, REBUILD_PENALTY, 0)  # also on top of INFINITE, as in a repair
    enter, leave = (rng.random((layers + 1, rows)) < 0.8 if rng.random() < 0.5 else None for _ in "io")
    dag = LayerDag(np.arange(rows), tau, rho, enter, leave)
    return dag, costs(rows, missing=0.1), costs(rows, missing=0.1)


@pytest.mark.slow
def test_the_compiled_relaxation_is_the_plain_one() -> None:
    assert compiled is not None, "make setup compiles it"
    rng = np.random.default_rng(5)
    found = 0
    for _ in range(2000):
        dag, entries, exits = random_dag(rng)
        closed = rng.random(dag.count) < 0.2 if rng.random() < 0.4 else None
        tau = dag.tau if closed is None else np.where(closed, INFINITE, dag.tau)
        go = relax_backward(dag, exits, closed)
        np.testing.assert_array_equal(go, relax_backward_plain(dag, tau, exits))
        found += trace_back(dag, go, entries, exits) is not None
    assert 500 < found < 1900


def test_closed_rows_are_as_if_absent() -> None:
    rng = np.random.default_rng(6)
    for _ in range(300):
        dag, entries, exits = random_dag(rng)
        closed = rng.random(dag.count) < 0.2
        kept = np.flatnonzero(~closed)
        apart = trace_back(dag.take(kept), relax_backward(dag.take(kept), exits[kept]), entries[kept], exits[kept])
        found = trace_back(dag, relax_backward(dag, exits, closed), entries, exits)
        assert (found and (found.cost, found.owners)) == (apart and (apart.cost, apart.owners))


def test_without_a_compiler_the_routes_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [RouteNode(f"n{i}", 4 * (i % 4), 4 * (i % 4) + 4, 1.0 + i % 3) for i in range(16)]
    links = {a.id: {b.id: float((ord(a.id[-1]) + ord(b.id[-1])) % 5) for b in nodes} for a in nodes}
    quick = route(nodes, 16, links)
    monkeypatch.setattr(routing_dp, "compiled", None)
    assert route(nodes, 16, links) == quick


def test_arrays_that_do_not_fit_are_refused() -> None:
    assert compiled is not None
    tau, rho, exits, go = (np.zeros(shape, np.int64) for shape in ((4, 3), (3, 3), 3, (5, 3)))
    compiled(4, 3, tau, rho, exits, None, None, go)
    for wrong in (
        (4, 3, tau, rho[:2], exits, None, None, go),
        (4, 3, tau, rho, exits, np.ones((4, 3), np.bool_), None, go),
        (3, 3, tau, rho, exits, None, None, go),
        (4, -3, tau, rho, exits, None, None, go),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            compiled(*wrong)
