"""What every endpoint is given: the models by name, and the bounds of a request."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from swarm.config import GatewayConfig
from swarm_gateway.errors import ApiError
from swarm_gateway.serving.metrics import GatewayMetrics
from swarm_gateway.serving.served_model import ServedModel


class Gateway:
    """`models`: at least one, of different names. A request that names none, or "default", gets the first."""

    def __init__(
        self, models: Sequence[ServedModel], config: GatewayConfig | None = None, metrics: GatewayMetrics | None = None
    ) -> None:
        self.models = {model.name: model for model in models}
        self.config = config or GatewayConfig()
        self.metrics = metrics or models[0].metrics

    def model(self, name: str) -> ServedModel:
        """Raises ApiError, status 404."""
        if name in ("", "default"):
            return next(iter(self.models.values()))
        found = self.models.get(name)
        if found is None:
            known = ", ".join(self.models)
            raise ApiError(404, "model_not_found", f"there is no model '{name[:100]}'; there is {known}", param="model")
        return found


def caller_of(request: Request) -> str:
    """Who asks, for taking turns: the key if there is one, else the address."""
    key = request.scope.get("swarm_gateway.key")
    return key or (request.client.host if request.client else "")
