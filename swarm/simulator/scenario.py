"""A scenario: everything a simulation depends on, in one typed file. Two runs of one scenario give the same results.

Every setting is a named field, so that what a paper leaves out and had to be assumed can be seen and changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from swarm.errors import UsageError
from swarm.planner.schemas import error_text
from swarm.simulator.model.devices import DeviceSpec
from swarm.simulator.model.hostile import HostileSpec
from swarm.simulator.model.model import ModelSpec
from swarm.simulator.model.network import NetworkSpec
from swarm.simulator.model.workload import WorkloadSpec


class ServingSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How nodes serve and clients behave; defaults are those of `swarm.config` where it has one."""

    batch_tokens: int = 512  # rows of one batch
    sessions_per_node: int = 64  # more are refused, or queue where the policy queues at nodes
    sessions_per_batch: int | None = None  # 1: no batching of sessions; none: as many as fit
    kv_reserve_tokens: int = 16384  # KV tokens a layer gets before a node takes another layer
    prefill_chunk: int = 256
    refresh_ms: float = 1000.0  # how old a reader's snapshot may be; 0: always current
    route_retry_ms: float = 500.0
    route_timeout_ms: float = 5000.0  # how long a client waits while no chain can be had
    repair_timeout_ms: float = 30000.0  # ... after its chain broke
    dial_timeout_ms: float = 10000.0  # how long it takes to find out that a node in the snapshot is gone
    detect_ms: float = 1000.0  # how long it takes to find out that a node in use is gone
    record_lifetime_ms: float = 12000.0  # how long a node that is gone stays in snapshots
    most_repairs: int = 16  # of one request


class ChurnSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In each period of `period_s`, `leave_share` of the nodes then present crash at random moments.

    `replace`: as many new ones join, at other random moments. New nodes measure for `measure_s`, then load their
    layers at `load_mb_per_s`.
    """

    leave_share: float = 0.0
    period_s: float = 60.0
    periods: int = 0
    replace: bool = False
    measure_s: float = 5.0
    load_mb_per_s: float = 500.0
    rebalance_s: float = 5.0  # how often the swarm checks whether to rebalance; 0: never

    def __post_init__(self) -> None:
        if not 0 <= self.leave_share <= 1 or not self.period_s > 0 or not self.load_mb_per_s > 0:
            raise ValueError("leave_share lies between 0 and 1; period_s and load_mb_per_s are above 0")


PolicyName = Literal[
    "swarm", "trusting", "hyperion", "jupiter", "petals", "hexgen", "edgeshard", "gpipe", "heft", "round_robin"
]


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy, and the decisions a paper leaves open. `label`: what tables call it."""

    name: PolicyName = "swarm"
    label: str = ""
    alpha: float = 1.0  # swarm: how much phase 1 prefers replicas
    dispatch: Literal["least_loaded", "weighted", "round_robin"] = "least_loaded"  # hexgen: requests to pipelines
    partition: Literal["proportional", "fill"] = "proportional"  # heft: its memory-aware greedy partition
    objective: Literal["latency", "throughput"] = "latency"  # edgeshard, hexgen: what their search is for
    sessions_per_batch: int = 0  # instead of the serving table's; 1: an engine that cannot batch
    draft_tokens: int = 0  # jupiter: drafted tokens a step, each from a head of its own (Medusa, top 1)
    acceptance: tuple[float, ...] = ()  # jupiter: chance that head i is right if those before it were
    outline_tokens: int = 0  # jupiter: tokens of the outline; 0: no outline
    points: int = 1  # jupiter: points that are then extended at the same time
    point_prompt: int = 8  # jupiter: tokens of the directive of one point
    min_chunk: int = 0  # jupiter: least tokens of a prefill chunk; 0: what keeps the slowest device busy
    overhead_ms: float = 18.0  # petals: what its router charges a hop (its source: 0.018 s)

    @property
    def title(self) -> str:
        return self.label or self.name


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sweep` is for benchmarks: dotted names of fields and the values to try, all combinations."""

    name: str
    seed: int = 0
    until_s: float = 36000.0  # virtual seconds after which nothing more happens
    model: ModelSpec
    devices: tuple[DeviceSpec, ...]
    network: NetworkSpec = NetworkSpec()
    workload: WorkloadSpec
    serving: ServingSpec = ServingSpec()
    churn: ChurnSpec = ChurnSpec()
    hostile: HostileSpec = HostileSpec()
    policy: PolicySpec = PolicySpec()
    sweep: dict[str, list[Any]] = {}
    notes: dict[str, str] = {}

    def __post_init__(self) -> None:
        if not sum(device.count for device in self.devices):
            raise ValueError("a scenario needs at least one device")


def parse(table: Mapping[str, Any]) -> Scenario:
    """A decoded TOML or JSON file as a Scenario. Raises UsageError."""
    try:
        return msgspec.convert(table, Scenario, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"the scenario is not one: {error_text(str(error))}") from None


def changed(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a decoded file with `changes` at dotted names: {"workload.rate_per_s": 4, "devices.0.count": 2}.

    A table is merged into the one that is there. Raises UsageError for a name that leads nowhere.
    """
    result: dict[str, Any] = msgspec.convert(table, dict[str, Any])
    for path, value in changes.items():
        result = _with(result, path.split("."), value, path)
    return result


def _with(where: Any, path: list[str], value: Any, whole: str) -> Any:
    if not path:
        return {**where, **value} if isinstance(where, Mapping) and isinstance(value, Mapping) else value
    first, *rest = path
    if isinstance(where, Mapping):
        return {**where, first: _with(where.get(first, {}), rest, value, whole)}
    if isinstance(where, list) and first.isdigit() and int(first) < len(where):
        return [_with(item, rest, value, whole) if i == int(first) else item for i, item in enumerate(where)]
    raise UsageError(f"'{whole}' names no field of the scenario")


def runs(table: Mapping[str, Any]) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """All combinations of a file's `sweep`: (what was chosen, by name, for people; the table with it).

    A name that begins with "@" stands for several changes at once: its values are tables of dotted names and a `label`.
    """
    sweep = table.get("sweep", {})
    base = {key: value for key, value in table.items() if key != "sweep"}
    for values in itertools.product(*sweep.values()):
        chosen: dict[str, str] = {}
        changes: dict[str, Any] = {}
        for name, value in zip(sweep, values, strict=True):
            if name.startswith("@"):
                chosen[name[1:]] = str(value["label"])
                changes.update({path: v for path, v in value.items() if path != "label"})
            else:
                chosen[name] = _title(value, base.get(name))
                changes[name] = value
        yield chosen, changed(base, changes)


def _title(value: Any, before: Any) -> str:
    if isinstance(value, Mapping):
        merged = {**before, **value} if isinstance(before, Mapping) else value
        return str(value.get("label") or merged.get("name", ""))
    return str(value)
