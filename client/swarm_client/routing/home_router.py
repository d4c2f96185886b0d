"""Routing for a client that holds the ends of the model itself: what is searched for is a chain of the inner model.

Owns the translation: chains that come in lose the hops at home and get the inner model's numbers, chains that go out
get them back. The choice is `ChainRouter`'s, which knows of no other model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from swarm.config import ClientConfig
from swarm.errors import NetworkError, NoRoute
from swarm.net.gossip.record_reader import RecordReader
from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.routing.repair import Repair
from swarm.planner.routing.rules import APART, ChainRules
from swarm.planner.trust.belief import PeerBelief
from swarm.planner.trust.evidence import UNKNOWN
from swarm.types import Chain, PeerId, Snapshot
from swarm_client.home.ends import HomeEnds
from swarm_client.home.local_layers import FIRST, LAST, is_home
from swarm_client.home.trusted_ends import TrustedEnds
from swarm_client.network.connection import ClientNetwork
from swarm_client.routing.router import ChainRouter
from swarm_client.trust.chain_watch import ChainWatch, StepTimes
from swarm_client.trust.peer_memory import PeerMemory
from swarm_kernels.models.source import ModelSource


class HomeRouter(ChainRouter):
    """A ChainRouter whose chains begin and end at home. `whole`: the last snapshot, of the whole model."""

    def __init__(self, home: HomeEnds, *args: Any, **options: Any) -> None:
        """`args`, `options`: ChainRouter's."""
        super().__init__(*args, **options)
        self._home = home
        self._layers = home.layers
        self._home_ms = sum(stage.ms(1) for stage in home.stages)
        self.whole: Snapshot | None = None

    async def _read(self) -> NetworkError | None:
        error = await super()._read()
        if error is None and self._snapshot is not None:
            self.whole = self._snapshot
            self._snapshot = self._layers.inner_snapshot(self.whole)
        return error

    async def route(self, min_free_tokens: int = 0, stay: PeerId = "", change: PeerId = "") -> tuple[Chain, Snapshot]:
        try:
            chain, snapshot = await super().route(min_free_tokens, stay, change)
        except NoRoute as error:
            raise self._layers.outer_error(error) from None
        return self._around(chain), snapshot

    def reprice(self, chain: Chain, min_free_tokens: int = 0) -> Chain | None:
        priced = super().reprice(self._inside(chain), min_free_tokens)
        return self._around(priced) if priced is not None else None

    async def plan_repair(
        self,
        chain: Chain,
        lost: Collection[PeerId],
        min_free_tokens: int = 0,
        avoid: Collection[PeerId] = (),
        *,
        include_unresponsive: bool = False,
    ) -> tuple[Repair, Snapshot]:
        """Raises NoRoute also for a hop at home, which nobody replaces."""
        self._check_foreign(lost)
        try:
            inner, snapshot = await super().plan_repair(
                self._inside(chain), lost, min_free_tokens, avoid, include_unresponsive=include_unresponsive
            )
        except NoRoute as error:
            raise self._layers.outer_error(error) from None
        first, last = self._layers.hops
        kept, rebuild = (tuple(map(self._layers.outer_hop, hops)) for hops in (inner.kept, inner.rebuild))
        return Repair(self._around(inner.chain), (first, *kept, last), rebuild), snapshot

    async def route_around(self, chain: Chain, hops: Sequence[PeerId], min_free_tokens: int) -> Chain:
        others = [peer for peer in hops if not is_home(peer)]
        return self._around(await super().route_around(self._inside(chain), others, min_free_tokens))

    async def replace_hops(
        self, chain: Chain, hops: Collection[PeerId], avoid: Collection[PeerId], min_free_tokens: int
    ) -> Chain:
        self._check_foreign(hops)
        return self._around(await super().replace_hops(self._inside(chain), hops, avoid, min_free_tokens))

    def first_stranger(self, chain: Chain) -> PeerId | None:
        return super().first_stranger(self._inside(chain))

    def watch(self, chain: Chain) -> ChainWatch:
        watch = super().watch(chain)
        watch.beliefs = {**watch.beliefs, **self._beliefs_in_home()}
        return watch

    def took(self, times: StepTimes) -> None:
        measured = {peer: ms for peer, ms in times.measured_ms.items() if not is_home(peer)}
        super().took(replace(times, measured_ms=measured))

    def served(self, watch: ChainWatch, failed: Collection[PeerId]) -> None:
        super().served(watch, {*failed, FIRST, LAST})

    def block(self, peer: PeerId, cause: NetworkError) -> None:
        if not is_home(peer):
            super().block(peer, cause)

    def costs(self, chain: Chain) -> ChainCosts:
        inner = super().costs(self._inside(chain))
        first, last = self._home.stages
        return replace(inner, stages=(first, *inner.stages, last), link_ms=(0.0, *inner.link_ms, 0.0))

    def explain(self, chain: Chain) -> str:
        def outer(match: re.Match[str]) -> str:
            return f"layers {int(match[1]) + self._layers.first}:{int(match[2]) + self._layers.first}"

        inner = re.sub(r"layers (\d+):(\d+)", outer, super().explain(self._inside(chain)))
        return f"{self._home.describe()}\n{inner}"

    def _around(self, chain: Chain) -> Chain:
        return replace(self._layers.around(chain), cost_ms=chain.cost_ms + self._home_ms)

    def _inside(self, chain: Chain) -> Chain:
        return replace(self._layers.inside(chain), cost_ms=max(0.0, chain.cost_ms - self._home_ms))

    def _check_foreign(self, peers: Collection[PeerId]) -> None:
        if any(map(is_home, peers)):
            raise NoRoute("the layers that this client holds itself have failed, and nobody else has its text")

    def _beliefs_in_home(self) -> Mapping[PeerId, PeerBelief]:
        ms = [stage.layer_ms for stage in self._home.stages]
        return {
            peer: PeerBelief(peer, "", UNKNOWN, True, of, of, of, 0.0, False, False)
            for peer, of in zip((FIRST, LAST), ms, strict=True)
        }


def router_of(
    config: ClientConfig,
    source: ModelSource,
    network: ClientNetwork,
    reader: RecordReader,
    memory: PeerMemory,
    ends: HomeEnds | TrustedEnds | None,
) -> ChainRouter:
    """The router that keeps what `config` asks of chains."""
    home = ends if isinstance(ends, HomeEnds) else None
    return (ChainRouter if home is None else partial(HomeRouter, home))(
        reader,
        network.pool,
        dtype=config.dtype if home is None else home.dtype,
        weight_hash=source.weight_hash,
        row_bytes=source.config.rows.widest * 4,  # at most, in fp32
        wall_clock=network.wall_clock,
        memory=memory,
        rules=ChainRules(APART[config.apart], frozenset(config.trust)),
        known_first=config.known_first,
    )
