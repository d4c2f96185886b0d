"""The ends of a model that a client holds itself, or that nodes hold that it trusts.

Owns which of both a client has. Loading and serving the layers at home is `served_ends`'s; which layers these are,
`local_layers`'; what crosses to the hops of others, `home_edges`'s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from swarm.config import ClientConfig
from swarm.errors import UsageError
from swarm.extras import needs_torch
from swarm.net.gossip.record_reader import RecordReader
from swarm.planner.costs.chain_costs import Stage
from swarm.types import PeerId
from swarm_client.home.local_layers import NONE, LocalLayers
from swarm_client.home.loopback import HomeLink
from swarm_client.home.trusted_ends import TrustedEnds, trusted_ends
from swarm_client.network.connection import ClientNetwork
from swarm_kernels.models.source import ModelSource
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class HomeEnds:
    """`links`: to the two hops, by their names. `client`: this peer, by which others know them. `stages`: what a step
    costs at each. `weight_bytes`: of what they hold."""

    layers: LocalLayers
    client: PeerId
    dtype: str
    hidden_size: int
    links: Mapping[PeerId, HomeLink]
    stages: tuple[Stage, Stage]
    weight_bytes: int

    def hold(self, chain: Sequence[PeerId]) -> bool:
        """Whether they are the ends of a chain; of every one."""
        return True

    def describe(self) -> str:
        """What stays at home, for people."""
        first, last = self.layers.hops
        return (
            f"embedding, layers {first.span} and {last.span}, norm and head are computed here"
            f" ({self.weight_bytes / 2**20:.0f} MiB): no other machine gets token ids, all get hidden states"
        )


@asynccontextmanager
async def hold_ends(
    config: ClientConfig,
    source: ModelSource,
    tokenizer: Awaitable[ChatTokenizer],
    network: ClientNetwork,
    reader: RecordReader,
) -> AsyncIterator[HomeEnds | TrustedEnds | None]:
    """Load and serve what `config.local_layers` says, or name whom `config.trust` does; None for neither. `reader`: of
    the nodes, whose dtype is taken.

    Raises UsageError, ModelError, OutOfMemory, NetworkError.
    """
    trusted = trusted_ends(config, network.pool.peer, source.config.hidden_size)
    if not source.config.rows.is_plain and (trusted is not None or config.local_layers != NONE):
        raise UsageError(
            f"every hop of '{source.name}' gets inputs of its layers that say which token they are of, so that "
            "--local-layers and --trust would hide nothing; leave them out"
        )
    if config.local_layers == NONE:
        yield trusted
        return
    if config.drafter == "medusa":
        raise UsageError("Medusa heads are at the nodes' tail, which --local-layers replaces; choose another --drafter")
    if config.drafter == "tail":
        raise UsageError("a tail's drafter needs token ids, which --local-layers keeps here; choose another --drafter")
    needs_torch("--local-layers, which computes layers here,")
    from swarm_client.home.served_ends import serve_ends

    async with serve_ends(config, source, tokenizer, network, reader) as ends:
        yield ends
