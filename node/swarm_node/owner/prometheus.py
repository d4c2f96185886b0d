"""Prometheus: the node's metrics over HTTP, on 127.0.0.1 unless configured otherwise.

Owns the names of the metrics and their server. The values are read at each scrape, in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from swarm.errors import AddressInUse
from swarm.types import NodeState
from swarm_node.owner.node_metrics import NodeMetrics

SCRAPE_TIMEOUT_S = 5.0

GAUGES = {
    "open_sessions": "Sessions open now.",
    "max_sessions": "Sessions this node takes at most.",
    "layer_ms": "Expected milliseconds a layer takes for a token of one session more.",
    "layer_capacity": "Layers that fit into this node's memory.",
    "kv_capacity_tokens": "Tokens each layer can hold.",
    "kv_free_tokens": "Of these, not reserved.",
    "up_s": "Seconds since the start.",
    "tasks": "Tasks of the event loop.",
    "owner_sessions": "Sessions open now of the owner's clients, which are served before all others.",
    "favored_sessions": "Sessions open now of clients whose nodes have worked for clients of this machine.",
    "contributors": "Such nodes.",
}
COUNTERS = {
    "sessions": "Sessions taken in.",
    "refused": "Sessions refused.",
    "failed": "Sessions that this node had to end.",
    "steps": "Steps computed.",
    "tokens": "Tokens sampled, if this node holds the last layer.",
    "protocol_errors": "Messages that broke the protocol.",
    "sent_bytes": "Bytes sent to peers.",
    "moves": "Changes of layers.",
    "daemon_restarts": "Times the p2p daemon died and was started again.",
    "given_layer_tokens": "Rows computed times layers, over all starts with this identity.",
    "given_compute_s": "Seconds of computing, likewise.",
    "given_bytes": "Bytes sent to peers, likewise.",
    "acknowledged_layer_tokens": "Tokens times layers for which clients signed receipts, likewise.",
}


class NodeMetricsCollector(Collector):
    def __init__(self, metrics: Callable[[], NodeMetrics]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        now = self._metrics()
        for name, words in GAUGES.items():
            yield GaugeMetricFamily(f"swarm_{name}", words, getattr(now, name))
        for name, words in COUNTERS.items():
            yield CounterMetricFamily(f"swarm_{name}", words, getattr(now, name))
        state = GaugeMetricFamily("swarm_state", "1 for the state this node is in.", labels=["state"])
        for each in NodeState:
            state.add_metric([str(each)], float(str(each) == now.state))
        yield state
        span = GaugeMetricFamily("swarm_span", "The layers served, [start, end).", labels=["edge"])
        for edge, layer in (("start", now.start), ("end", now.end)):
            if layer is not None:
                span.add_metric([edge], layer)
        yield span


@contextlib.contextmanager
def serving(metrics: Callable[[], NodeMetrics], host: str, port: int) -> Iterator[int]:
    """Serve `/metrics` in a thread until the block ends; yields the port. Raises AddressInUse."""
    loop = asyncio.get_running_loop()

    async def now() -> NodeMetrics:
        return metrics()

    registry = CollectorRegistry()
    registry.register(
        NodeMetricsCollector(lambda: asyncio.run_coroutine_threadsafe(now(), loop).result(SCRAPE_TIMEOUT_S))
    )
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise AddressInUse(f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another port") from None
    for standard in (ProcessCollector, PlatformCollector, GCCollector):
        standard(registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
