"""The OpenAPI file of a gateway, made of its endpoints: https://spec.openapis.org/oas/v3.1.0"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from swarm import __version__
from swarm_gateway.http.endpoint import Endpoint

_REF = "#/components/schemas/{name}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        }
    },
}
"""What the errors of all APIs share."""
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


def openapi(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    types = list(dict.fromkeys(kind for e in endpoints for kind in (e.request, e.response) if kind is not None))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = _PARAMETER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "swarm-gateway", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(endpoint: Endpoint, schema_of: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.response is not None:
        content["application/json"] = {"schema": schema_of[endpoint.response]}
    if endpoint.streams:
        content["text/event-stream"] = {}
    done: dict[str, Any] = {"description": endpoint.summary}
    if content:
        done["content"] = content
    error = {
        "description": "What was wrong, in this API's form.",
        "content": {"application/json": {"schema": _ERROR}},
    }
    others = {
        str(status): {"description": endpoint.summary, "content": {"application/json": {"schema": schema_of[kind]}}}
        for status, kind in endpoint.others
    }
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": re.sub(r"\W+", "_", f"{endpoint.method.lower()}{endpoint.path}").strip("_"),
        "responses": {"200": done, **others, "default": error},
    }
    parameters = [_parameter(name, "path", {"type": "string"}) for name in _PARAMETER.findall(endpoint.path)]
    parameters += [_parameter(name, "query", msgspec.json.schema(kind)) for name, kind in endpoint.parameters]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.request is not None:
        body = {"application/json": {"schema": schema_of[endpoint.request]}}
        operation["requestBody"] = {"required": True, "content": body}
    if endpoint.public:
        operation["security"] = []
    return operation


def _parameter(name: str, place: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}
