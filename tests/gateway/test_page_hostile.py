"""What strangers send to the page: markdown of a model, names of nodes, errors. In a headless Chromium."""

from __future__ import annotations

from page_browser import NEEDS_CHROMIUM, ask, opened, pieces
from page_fakes import FakeGateway, small_swarm
from playwright.async_api import expect
from starlette.responses import JSONResponse

pytestmark = NEEDS_CHROMIUM

# Everything that has made a page of a model's words execute or fetch something elsewhere.
HOSTILE = """<script>window.pwned = 1</script>
<img src=x onerror="window.pwned = 2">
<svg onload="window.pwned = 3"></svg><iframe src="https://evil.example/"></iframe>

<style>body { display: none }</style><form action="https://evil.example"><input name=q></form>

![tracker](https://evil.example/pixel.png) ![x](javascript:window.pwned=4)

[js](javascript:window.pwned=5) [enc](&#106;avascript:window.pwned=6)
[data](data:text/html,<script>window.pwned=7</script>)
[tab](java\tscript:window.pwned=8) [vb](vbscript:x) [rel](/v1/models) [good](https://example.com/a?b=1&c=2)

<https://example.org> [ref][r]

```html" onmouseover="window.pwned=9
<b>bold</b>
```

| a | b |
|--|--|
| <img src=x onerror=window.pwned=10> | `<script>` |

[r]: javascript:window.pwned=11
"""


async def test_hostile_markdown_stays_text() -> None:
    gateway = FakeGateway(small_swarm())
    gateway.script = pieces(HOSTILE, 7)
    async with opened(gateway, allowed=("trusted-types", "TrustedHTML")) as watched:
        page = watched.page
        await ask(page, "<img src=x onerror=window.pwned=12>")
        await expect(page.locator("#send")).to_be_visible()
        assert await page.evaluate("window.pwned") is None
        for tag in ("script", "img", "svg", "iframe", "style", "form", "input"):
            await expect(page.locator(f"#log {tag}")).to_have_count(0)
        links = await page.eval_on_selector_all("#log a", "all => all.map(a => [a.href, a.rel, a.target])")
        assert [href for href, _, _ in links] == [
            "https://evil.example/pixel.png",  # a link in place of the image: only a click fetches it
            "https://example.com/a?b=1&c=2",
            "https://example.org/",
        ]
        assert {(rel, target) for _, rel, target in links} == {("noopener noreferrer nofollow", "_blank")}
        await expect(page.locator(".assistant .body")).to_contain_text("<script>window.pwned = 1</script>")
        await expect(page.locator(".user .body")).to_have_text("<img src=x onerror=window.pwned=12>")
        assert watched.problems == []
        policy = await page.evaluate("try { document.body.innerHTML = '<b>x</b>'; 'open' } catch { 'closed' }")
        assert policy == "closed"  # trusted types: no string becomes HTML, even by mistake


async def test_hostile_texts_do_not_hang_the_page() -> None:
    gateway = FakeGateway(small_swarm())
    gateway.script = [
        {"content": text} for text in (">" * 5000, "\n\n" + "*a" * 5000, "\n\n" + "[" * 5000, "\n\n" + "- " * 3000)
    ]
    async with opened(gateway) as watched:
        await ask(watched.page)
        await expect(watched.page.locator("#send")).to_be_visible(timeout=10_000)
        await expect(watched.page.locator(".assistant .body")).to_contain_text("[[[[")


async def test_the_names_of_strangers_stay_text() -> None:
    nodes = small_swarm()
    nodes[0] |= {"name": "<img src=x onerror=window.pwned=1>\u202egnp\u0000", "region": "<b>", "layer_ms": "9" * 99}
    nodes[1] |= {"links": {"<b>": "x"}, "start": -5, "end": 10**9, "state": "x" * 500}
    nodes[2] |= {"name": ["a"], "kv_free_tokens": -1e308, "sessions": None}
    gateway = FakeGateway(nodes)
    gateway.totals = lambda: {"coverage": [2, "x", None], "missing": [[0, 10**12], "x"], "answers": [None, {"id": 3}]}  # type: ignore[method-assign]
    async with opened(gateway) as watched:
        page = watched.page
        await page.click("#as-table")
        await expect(page.locator("#nodes tbody tr")).to_have_count(7)
        await expect(page.locator("#nodes")).to_contain_text("<img src=x onerror=window.pwned=1>gnp")
        gateway.change(joined=[None, 3, {"peer": "p"}], left=[{}], moved=[None, {"peer": "p", "to": "x"}], updated="x")
        await expect(page.locator("#nodes tbody tr")).to_have_count(8)
        assert await page.evaluate("window.pwned") is None


async def test_a_key_is_asked_for_and_kept_for_the_tab() -> None:
    gateway = FakeGateway(small_swarm())
    gateway.key = "secret"
    async with opened(gateway, allowed=("401",)) as watched:
        page = watched.page
        await expect(page.locator("#key")).to_be_visible()
        await page.fill("#key-input", "secret")
        await page.keyboard.press("Enter")
        await expect(page.locator("#models option")).to_have_count(2)
        await ask(page)
        await expect(page.locator(".assistant .body")).to_have_text("Hello.")
        assert await page.evaluate("JSON.stringify(localStorage).includes('secret')") is False


async def test_errors_are_sentences() -> None:
    gateway = FakeGateway(small_swarm())
    full = {"error": {"message": "The swarm is full <b>now</b>."}}
    gateway.refusal = JSONResponse(full, 429, {"retry-after": "7"})
    async with opened(gateway, allowed=("429",)) as watched:
        page = watched.page
        await ask(page)
        await expect(page.locator(".assistant .error")).to_have_text("The swarm is full <b>now</b>. Try again in 7 s.")
        gateway.refusal = None
        await page.click("text=Retry")
        await expect(page.locator(".assistant .body")).to_have_text("Hello.")
