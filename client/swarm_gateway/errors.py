"""What goes wrong in a request, independent of the HTTP API: status, code and sentence. Each API has its own JSON form
for it. Owns the mapping of the client's errors to statuses."""

from __future__ import annotations

from swarm.errors import ContextOverflow, InvalidRequest, NetworkError, NodeBusy, NoRoute, SwarmError

MAX_MESSAGE = 500  # characters


class ApiError(Exception):
    """`status`: of HTTP. `code`: as in `swarm.errors`, or of the gateway: `invalid_json`, `model_not_found`,
    `invalid_api_key`, `not_found`, `rate_limited`. `param`: the field of the request that is wrong.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        if len(message) > MAX_MESSAGE:  # it may quote the request
            message = message[: MAX_MESSAGE - 1] + "…"
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, error: SwarmError) -> ApiError:
        """Busy and routeless swarms are 429 and 503 with a time to wait; a broken swarm is 502."""
        match error:
            case ContextOverflow():
                return cls(400, "context_length_exceeded", str(error), param="messages")
            case InvalidRequest():
                return cls(400, error.code, str(error))
            case NodeBusy():
                return cls(429, error.code, str(error), retry_after_s=error.retry_after_s)
            case NoRoute():
                return cls(503, error.code, str(error), retry_after_s=5.0)
            case NetworkError():
                return cls(502, error.code, str(error))
            case _:
                return cls(500, error.code, str(error))
