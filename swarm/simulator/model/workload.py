"""Requests and their arrival: Poisson, all at once, one after the other, or a trace that is replayed."""

from __future__ import annotations

from typing import Literal

import msgspec

from swarm.simulator.model.rng import NamedStream


class Lengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens: always `median`, or lognormal around it with `sigma`, cut to `[least, most]`."""

    median: int
    sigma: float = 0.0
    least: int = 1
    most: int = 1 << 20

    def draw(self, stream: NamedStream) -> int:
        length = round(stream.lognormal(self.median, self.sigma)) if self.sigma else self.median
        return max(self.least, min(length, self.most))


class Replayed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of a trace."""

    at_s: float
    prompt: int
    output: int


class WorkloadSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`trace`, if given, is replayed; else `requests` of them come as `arrivals` says.

    "closed": every client makes its next one when its last has ended, so that throughput shows what the swarm gives.
    """

    requests: int = 0
    rate_per_s: float = 1.0
    arrivals: Literal["poisson", "at_once", "closed"] = "poisson"
    prompt: Lengths = Lengths(median=128)
    output: Lengths = Lengths(median=128)
    trace: tuple[Replayed, ...] = ()

    def __post_init__(self) -> None:
        if not self.rate_per_s > 0:
            raise ValueError("rate_per_s must be above 0")


class SimRequest(msgspec.Struct, frozen=True):
    """`at`: ms. `client`: the place it comes from."""

    number: int
    at: float
    prompt: int
    output: int
    client: str


def requests(spec: WorkloadSpec, clients: int, seed: int) -> list[SimRequest]:
    """All requests in order of arrival. Arrivals and lengths are drawn apart: another rate, the same requests."""
    arrivals, lengths, places = (NamedStream(seed, "workload", part) for part in ("arrivals", "lengths", "places"))
    trace = spec.trace
    found: list[SimRequest] = []
    at = 0.0
    for number in range(len(trace) or spec.requests):
        client = f"client{places.below(max(clients, 1))}"
        if trace:
            entry = trace[number]
            found.append(SimRequest(number, entry.at_s * 1e3, entry.prompt, entry.output, client))
            continue
        at += arrivals.exponential(1e3 / spec.rate_per_s) if spec.arrivals == "poisson" else 0.0
        found.append(SimRequest(number, at, spec.prompt.draw(lengths), spec.output.draw(lengths), client))
    return sorted(found, key=lambda request: (request.at, request.number))
