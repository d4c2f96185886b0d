"""The gateway's figures for Prometheus, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class GatewayMetrics:
    """One set for all models of a gateway; label values come from its own tables, never from a request."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        name = "swarm_gateway_"

        def counter(what: str, text: str, *labels: str) -> Counter:
            return Counter(name + what, text, labels, registry=registry)

        def gauge(what: str, text: str, *labels: str) -> Gauge:
            return Gauge(name + what, text, labels, registry=registry)

        def seconds(what: str, text: str) -> Histogram:
            return Histogram(name + what, text, ("model",), registry=registry, buckets=_SECONDS)

        self.requests = counter("requests", "Answered requests.", "endpoint", "status")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.", "model")
        self.cached_tokens = counter("cached_prompt_tokens", "Prompt tokens found in prefix caches.", "model")
        self.generated_tokens = counter("generated_tokens", "Generated tokens.", "model")
        self.drafted_tokens = counter("drafted_tokens", "Tokens that drafters proposed.", "model")
        self.accepted_tokens = counter("accepted_tokens", "Proposed tokens that the model accepted.", "model")
        self.repairs = counter("repairs", "Chains repaired or replaced during an answer.", "model")
        self.first_token = seconds("first_token_seconds", "From the request to its first token.")
        self.between_tokens = seconds("between_tokens_seconds", "Between steps with tokens of one answer.")
        self.running = gauge("running", "Requests that run.", "model")
        self.queued = gauge("queued", "Requests that wait for their turn.", "model")
        self.chain_length = gauge("chain_length", "Hops of the last finished answer's chain.", "model")

    def text(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)
