"""`swarm-node status`: who serves what, how busy they are, which layers are missing, and what runs on this machine.

Owns the format. Sees what a client would see, and serves nothing itself.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from swarm.config import DEFAULT_MODEL, Libp2pImpl, local_swarm
from swarm.errors import UsageError
from swarm.planner.placement.experts import holders, missing_experts
from swarm.records import WRONG_DEPTH
from swarm.types import NodeProfile, NodeState, Snapshot
from swarm_node.network.swarm_reader import swarm_reader
from swarm_node.owner import control_socket
from swarm_node.owner.node_metrics import NodeMetrics


async def show(
    peers: tuple[str, ...], model: str | None, as_json: bool, secret: str = "", libp2p_impl: Libp2pImpl = "go"
) -> None:
    """Print the swarm of `model` that `peers` belong to. Raises UsageError, PeerUnreachable, NetworkError.

    Without peers: the swarm of the nodes on this machine, and their metrics.
    """
    here: list[NodeMetrics] = []
    if not peers:
        here = [found.metrics for found in await control_socket.find()]
        peers, model = known_here(here, model)
    name = await asyncio.to_thread(name_of_model, model or DEFAULT_MODEL)
    async with swarm_reader(name, peers, secret, libp2p_impl) as reader:
        snapshot = await reader.snapshot()
    if as_json:
        sys.stdout.write(json.dumps({**to_json(snapshot), "here": msgspec.to_builtins(here)}) + "\n")
    else:
        width = None if sys.stdout.isatty() else 140  # a pipe has no width
        text = [*to_text(snapshot, reader.book.depth.reason), *([table_of(here)] if here else [])]
        Console(highlight=False, width=width).print(*text, sep="\n", markup=False)


def known_here(here: Sequence[NodeMetrics], model: str | None) -> tuple[tuple[str, ...], str | None]:
    """Peers to read the directory from, and the model. Raises UsageError."""
    try:
        local_model, peers = local_swarm()
        return peers, model or local_model
    except UsageError:
        if not here:
            raise
    chosen = model or here[0].model
    return tuple(node.address for node in here if node.model == chosen) or (here[0].address,), chosen


def table_of(here: Sequence[NodeMetrics]) -> Table:
    table = Table(title="On this machine", title_justify="left")
    for column in (
        "process",
        "name",
        "state",
        "layers",
        "sessions",
        "tokens",
        "sent",
        "given in all",
        "owner's, helpers'",
        "paused because",
    ):
        table.add_column(column)
    for node in here:
        table.add_row(
            str(node.pid),
            node.name,
            node.state,
            node.experts or (f"{node.start}:{node.end}" if node.start is not None else "-"),
            f"{node.open_sessions}/{node.max_sessions}",
            str(node.tokens),
            f"{node.sent_bytes / 1e6:.1f} MB",
            f"{node.given_layer_tokens / 1e6:.2f} M layer-tokens, {node.given_compute_s / 3600:.2f} h, "
            f"{node.given_bytes / 1e6:.1f} MB",
            f"{node.owner_sessions}, {node.favored_sessions} of {node.contributors} helpers",
            "; ".join((*node.paused, *((node.waits_for,) if node.waits_for else ()))) or "-",
        )
    return table


def to_json(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "model": snapshot.model,
        "num_layers": snapshot.num_layers,
        "nodes": [_node_json(node) for node in snapshot.nodes],
        "coverage": snapshot.coverage(),
        "missing": [list(gap) for gap in snapshot.missing()],
        "ignored": dict(snapshot.rejected_records),
    }


def to_text(snapshot: Snapshot, depth_reason: str = "") -> list[Table | str]:
    """A table of nodes, then one line on coverage, and what was left aside. `depth_reason`: who says how many layers
    there are."""
    if not snapshot.nodes:
        return [f"No node of {snapshot.model} is known to these peers."]
    table = Table(title=f"{snapshot.model}, {snapshot.num_layers} layers", title_justify="left")
    for column in ("peer", "name", "state", "layers", "ms/layer", "sessions", "KV free", "dtype", "region"):
        table.add_column(column)
    for node in snapshot.nodes:
        table.add_row(
            node.peer[-8:],
            node.name,
            str(node.state),
            layers_of(node),
            f"{sum(node.layer_ms) / len(node.layer_ms):.3f}" if node.layer_ms else "-",
            str(node.sessions),
            f"{node.kv_free_tokens}/{node.kv_capacity_tokens}",
            node.dtype,
            node.region,
        )
    missing = snapshot.missing()
    if missing:
        verdict = "Nobody serves layers " + ", ".join(f"{a}:{b}" for a, b in missing) + "."
    else:
        verdict = f"Every layer is served, by {min(snapshot.coverage())} or more nodes."
    waiting = [sentence for node in snapshot.nodes if (sentence := waits_for(node, snapshot))]
    reasons = {reason: reason for reason in snapshot.rejected_records}
    if WRONG_DEPTH in reasons and depth_reason:
        reasons[WRONG_DEPTH] += f" (of another number of layers than {snapshot.num_layers}; {depth_reason})"
    ignored = [f"{n} records ignored: {reasons[reason]}" for reason, n in sorted(snapshot.rejected_records.items())]
    return [table, verdict, *waiting, *ignored]


def layers_of(node: NodeProfile) -> str:
    """Its layers; of a node that shares the experts of some, which of them it holds."""
    share = node.experts
    if share is None:
        return str(node.span or "-")
    held = f"experts {share.first}:{share.end} of {share.count}"
    return f"{held} in {share.layers}" if node.span is None else f"{node.span}, {held}"


def waits_for(node: NodeProfile, snapshot: Snapshot) -> str:
    """Of a leader that waits: for which experts, by the records; "" for others."""
    own = node.experts
    if node.state is not NodeState.WAITING or own is None or node.span is None:
        return ""
    alike = (n for n in snapshot.nodes if (n.weight_hash, n.dtype) == (node.weight_hash, node.dtype))
    missing = missing_experts(own.layers, own, [n.experts for n in holders(alike, own.count) if n.experts is not None])
    ranges = ", ".join(f"{a}:{b}" for a, b in sorted({gap for gaps in missing.values() for gap in gaps}))
    why = f"nobody holds experts {ranges}" if ranges else "it tries those who hold its experts"
    return f"{node.name or node.peer[-8:]} leads layers {node.span} and waits: {why}."


def _node_json(node: NodeProfile) -> dict[str, Any]:
    return {
        "peer": node.peer,
        "name": node.name,
        "state": str(node.state),
        "start": node.span.start if node.span else None,
        "end": node.span.end if node.span else None,
        "experts": None if node.experts is None else layers_of(node),
        "layer_ms": [round(ms, 4) for ms in node.layer_ms],
        "layer_capacity": node.layer_capacity,
        "kv_capacity_tokens": node.kv_capacity_tokens,
        "kv_free_tokens": node.kv_free_tokens,
        "sessions": node.sessions,
        "dtype": node.dtype,
        "weight_hash": node.weight_hash,
        "region": node.region,
        "addresses": list(node.addresses),
        "link_ms": dict(node.link_ms),
        "version": node.version,
    }


def name_of_model(spec: str) -> str:
    """The name of a model in the directory: read from a file or folder; any other spec is one already."""
    if not Path(spec).expanduser().exists():
        return spec
    from swarm_kernels.models.open import open_model

    source = open_model(spec)
    try:
        return source.name
    finally:
        source.close()
