"""The web page at `/`: its files, read once, served with headers that let nothing from elsewhere in.

The page is plain files in `page/`; there is no build step. It speaks to the same endpoints as every other program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent / "page"
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

# What a model writes is hostile. The page makes elements from text only, and these headers stop what would slip by: no
# inline script, no other host, no string becomes HTML (trusted types), no frame around it.
_CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # a browser asks each time whether its copy is the newest: 304 if so
}


@dataclass(frozen=True, slots=True)
class _PageFile:
    body: bytes
    media_type: str
    etag: str


def page_routes() -> list[Route]:
    """`/` and `/page/...`, to be put into the application. They need no key: nothing in them is secret."""
    paths = [path for path in sorted(_FOLDER.rglob("*")) if path.suffix in _MEDIA_TYPES]
    files = {path.relative_to(_FOLDER).as_posix(): _read(path) for path in paths}
    index = files.pop("index.html")
    return [Route("/", _endpoint(index)), *(Route(f"/page/{name}", _endpoint(file)) for name, file in files.items())]


def _read(path: Path) -> _PageFile:
    body = path.read_bytes()
    return _PageFile(body, _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def _endpoint(file: _PageFile) -> Callable[[Request], Awaitable[Response]]:
    headers = {**_HEADERS, "etag": file.etag}

    async def serve(request: Request) -> Response:
        known = request.headers.get("if-none-match", "").split(",")
        if file.etag in (tag.strip().removeprefix("W/") for tag in known):
            return Response(status_code=304, headers=headers)
        return Response(file.body, media_type=file.media_type, headers=headers)

    return serve
