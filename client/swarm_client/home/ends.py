"""The ends of a model that a client holds itself: the first and the last hop of its chains, in its own process.

Owns loading them, and the two hops that serve them with the session server of a node, over links that never leave the
process. Which layers these are is `local_layers`'; what crosses to the hops of others is `home_edges`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import torch

from swarm.config import ClientConfig
from swarm.errors import UsageError
from swarm.net.gossip.record_reader import RecordReader
from swarm.planner.costs.chain_costs import Stage
from swarm.types import LayerSpan, ModelId, PeerId, Snapshot
from swarm_client.home.auto_share import choose_share, swarm_layer_ms
from swarm_client.home.local_layers import AUTO, NONE, LocalLayers
from swarm_client.home.loopback import HomeChannel, HomeLink, NoLinks
from swarm_client.home.trusted_ends import TrustedEnds, trusted_ends
from swarm_client.network.connection import ClientNetwork
from swarm_hop.serving.compute_device import ThreadDevice
from swarm_hop.serving.executor import Executor
from swarm_hop.serving.grammars import TailGrammars
from swarm_hop.serving.session_server import SessionServer
from swarm_hop.serving.span_engine import SpanEngine
from swarm_kernels.calibration.cost_curve import StepTimer
from swarm_kernels.calibration.span_steps import step_cost
from swarm_kernels.device.device import available_memory, dtype_name, parse_dtype, state_dtype
from swarm_kernels.models.native_format import native_dtype
from swarm_kernels.models.source import ModelSource
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.span import Span
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)

_TIMED_CONTEXT, _TIMED_STEPS = 64, 7  # tokens, and steps of one row of which the quickest counts
MAX_KV_TOKENS = 1 << 17  # of all sessions at home; a block costs memory once it is written


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

    def states(self, dtype: str) -> torch.dtype:
        """Of hidden states on the wire where nodes compute in `dtype`."""
        return state_dtype(parse_dtype(dtype))

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
    if config.local_layers == NONE:
        yield trusted
        return
    if config.drafter == "medusa":
        raise UsageError("Medusa heads are at the nodes' tail, which --local-layers replaces; choose another --drafter")
    if config.drafter == "tail":
        raise UsageError("a tail's drafter needs token ids, which --local-layers keeps here; choose another --drafter")
    loop, snapshot = asyncio.get_running_loop(), await reader.snapshot()
    dtype = config.dtype or _served_dtype(snapshot, source)
    if config.local_layers == AUTO:
        layers = await loop.run_in_executor(None, _chosen, source, snapshot, parse_dtype(dtype))
        logger.info("--local-layers auto takes %s", layers)
    else:
        layers = LocalLayers.parse(config.local_layers, source.config.num_layers)
    first, last = await loop.run_in_executor(None, _load, source, layers, parse_dtype(dtype))
    costs = [await loop.run_in_executor(None, step_cost, span) for span in (first, last)]
    device = ThreadDevice("swarm-home")  # of both: the kernels' threads are shared
    async with AsyncExitStack() as stack:
        stack.callback(device.close)
        engines = [_engine(span, source, await tokenizer) for span in (first, last)]
        executors = [Executor(engine, device, config.limits.batch_tokens) for engine in engines]
        for executor in executors:  # ends after all servers have: they share the device
            stack.push_async_callback(executor.close)
        links = {}
        for hop, engine, executor in zip(layers.hops, engines, executors, strict=True):
            model = ModelId(source.name, source.weight_hash, dtype)
            server = await stack.enter_async_context(SessionServer(model, NoLinks(config.limits), config.limits))
            server.begin(engine, executor)
            links[hop.peer] = HomeLink(hop.peer, server, HomeChannel(network.pool.peer, hop.peer, network.demux))
        stages = [Stage(1, cost.ms_at(1), cost) for cost in costs]
        yield HomeEnds(
            layers,
            network.pool.peer,
            dtype,
            source.config.hidden_size,
            links,
            (stages[0], stages[1]),
            weight_bytes(first, last),
        )


def _chosen(source: ModelSource, snapshot: Snapshot, dtype: torch.dtype) -> LocalLayers:
    """What "auto" takes, by one layer that is loaded and timed here. Blocks. Raises ModelError, OutOfMemory."""
    span = load_span(source, LayerSpan(0, 1), dtype)
    timer = StepTimer(span, _TIMED_CONTEXT, 1)
    ms = min(timer.ms(1) for _ in range(_TIMED_STEPS))
    at_least = 0 if source.config.has_fast_path else 1
    return choose_share(
        swarm_layer_ms(snapshot), ms, span.layer_bytes, available_memory(span.device), at_least=at_least
    )


def _engine(span: Span, source: ModelSource, tokenizer: ChatTokenizer) -> SpanEngine:
    grammars = TailGrammars(lambda: tokenizer, source.config.vocab_size) if span.is_last else None
    context = span.config.context_length
    return SpanEngine(span, span.new_cache(max(context, min(MAX_KV_TOKENS, 16 * context))), grammars=grammars)


def _load(source: ModelSource, layers: LocalLayers, dtype: torch.dtype) -> tuple[Span, Span]:
    """The two spans; a head that is the embedding as well is read once. Blocks. Raises ModelError, OutOfMemory."""
    if not source.config.has_fast_path and not (layers.first and layers.last):
        raise UsageError(f"'{source.name}' runs on transformers' layers, one at least at each end: --local-layers 1:1")
    first, last = (hop.span for hop in layers.hops)
    ending = load_span(source, last, dtype)
    return load_span(source, first, dtype, like=ending), ending


def weight_bytes(first: Span, last: Span) -> int:
    """What the two hold; a head that is the embedding as well counts once."""
    held = sum(
        span.edge_bytes + (span.layer_bytes * len(span.layers) if len(span.layers) else 0) for span in (first, last)
    )
    tied = isinstance(first, LlamaSpan) and isinstance(last, LlamaSpan) and first.embedding is last.head
    return held - first.edge_bytes if tied else held


def _served_dtype(snapshot: Snapshot, source: ModelSource) -> str:
    """That of most nodes with these weights; without any, the one that nodes choose themselves."""
    counts = Counter(node.dtype for node in snapshot.serving() if node.weight_hash == source.weight_hash)
    return max(counts, key=lambda dtype: (counts[dtype], dtype)) if counts else dtype_name(native_dtype(source))
