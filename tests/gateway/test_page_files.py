"""The page's files as they are served: headers, caching, and nothing from elsewhere in them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

import swarm_gateway
from swarm_gateway.pages import page_routes

FOLDER = Path(swarm_gateway.__file__).parent / "page"
NAMES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())
# lib/marked.esm.js of marked 18.2.1 (npm), less its last line, which names a source map
MARKED_SHA256 = "c622dc6824a1c92c2d10ea9ede2fc872e46128afcc34b298e6ddee6f387ace8e"


def client() -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=Starlette(routes=page_routes()))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def test_every_file_is_served_with_headers_that_keep_others_out() -> None:
    async with client() as http:
        for name in NAMES:
            answer = await http.get("/" if name == "index.html" else f"/page/{name}")
            assert (answer.status_code, answer.content) == (200, (FOLDER / name).read_bytes())
            policy = answer.headers["content-security-policy"].split("; ")
            for rule in ("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"):
                assert rule in policy
            assert {"img-src 'self' data:", "frame-ancestors 'none'", "require-trusted-types-for 'script'"} <= set(
                policy
            )
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert "charset=utf-8" in answer.headers["content-type"] or name.endswith(".svg")


async def test_a_browser_with_the_newest_copy_gets_no_body() -> None:
    async with client() as http:
        first = await http.get("/page/app.js")
        tag = first.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}'):
            again = await http.get("/page/app.js", headers={"if-none-match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert (await http.get("/page/app.js", headers={"if-none-match": '"other"'})).status_code == 200
        assert (await http.head("/")).status_code == 200


@pytest.mark.parametrize(
    "path", ["/page/", "/page/index.html", "/page/../pages.py", "/page/%2e%2e/pages.py", "/page/..%2fpages.py"]
)
async def test_nothing_else_is_served(path: str) -> None:
    async with client() as http:
        assert (await http.get(path)).status_code == 404


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("vendor/")])
def test_nothing_comes_from_another_host_or_inline(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert (
        re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\son\w+=", text) == []
    )
    if name == "index.html":
        assert re.findall(r"<style|style=|<script(?! type=\"module\" src=)", text) == []


def test_the_vendored_parser_is_the_published_one() -> None:
    assert hashlib.sha256((FOLDER / "vendor" / "marked.js").read_bytes()).hexdigest() == MARKED_SHA256
    assert "Permission is hereby granted" in (FOLDER / "vendor" / "marked.LICENSE.txt").read_text(encoding="utf-8")


def test_the_page_is_small() -> None:
    assert sum((FOLDER / name).stat().st_size for name in NAMES) < 200_000
    lengths = {name: len((FOLDER / name).read_text(encoding="utf-8").splitlines()) for name in NAMES}
    assert {name: lines for name, lines in lengths.items() if lines > 400 and not name.startswith("vendor/")} == {}
