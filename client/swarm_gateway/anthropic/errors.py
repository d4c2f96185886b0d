"""Errors in Anthropic's form: `{"type": "error", "error": {"type", "message"}, "request_id"}`. Owns the error types."""

from __future__ import annotations

from typing import Any

from swarm_gateway.errors import ApiError

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",  # the package has no other type for it
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def anthropic_status(error: ApiError) -> int:
    """Anthropic's own status for "no capacity at all" is 529; its clients retry it."""
    return 529 if error.status == 503 else error.status


def anthropic_error(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
