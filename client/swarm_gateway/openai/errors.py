"""Errors as OpenAI's API writes them: https://platform.openai.com/docs/guides/error-codes"""

from __future__ import annotations

from typing import Any

from swarm_gateway.errors import ApiError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_form(error: ApiError) -> dict[str, Any]:
    fallback = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(error.status, fallback)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
