"""The page before the real gateway and a real swarm in memory: ask, lose a node, see the repair."""

from __future__ import annotations

from gateway_swarm import LAYERS, MODEL, GatewayUnderTest, gateway_swarm
from page_browser import NEEDS_CHROMIUM, ask, browsed
from playwright.async_api import expect

from swarm.config import GatewayConfig
from swarm.types import LayerSpan

pytestmark = NEEDS_CHROMIUM
TOKENS = 60


def pace(gateway: GatewayUnderTest, delay_s: float) -> None:
    """How long a batch takes on every node: slow while there is something to watch."""
    for node in gateway.swarm.nodes.values():
        node.device.delay_s = delay_s


async def test_a_node_dies_under_an_answer() -> None:
    async with gateway_swarm(sockets=True) as gateway:
        await gateway.swarm.add_node(LayerSpan(2, 4))
        pace(gateway, 0.05)
        async with browsed(str(gateway.http.base_url).rstrip("/")) as watched:
            page = watched.page
            await expect(page.locator("#health")).to_have_text("4 nodes, every layer served")
            assert await page.locator("#models").input_value() == MODEL
            await page.click("#settings-open")
            await page.fill("[name=max_tokens]", str(TOKENS))
            await page.fill("[name=temperature]", "0")
            await page.click("text=Save")
            await ask(page, "Why?")
            await expect(page.locator(".mine .hop")).to_have_count(3)
            (answer,) = gateway.model.observer.of(MODEL)  # type: ignore[union-attr]
            assert await page.evaluate("swarmPage.panel.mine()") == answer.id
            lost = answer.chain[1].peer
            before = await page.locator(".mine .hop b").all_inner_texts()
            gateway.swarm.kill(lost)
            repair = page.locator(".mine .repairs li").last
            await expect(repair).to_contain_text("replaced by")
            after = await page.locator(".mine .hop b").all_inner_texts()
            assert (before[0], before[2]) == (after[0], after[2])
            assert before[1] != after[1]
            pace(gateway, 0.001)
            await expect(page.locator("#send")).to_be_visible(timeout=30_000)
            await expect(page.locator(".assistant .error")).to_be_hidden()
            kept = await page.evaluate(
                "JSON.parse(localStorage[Object.keys(localStorage).find(k => k.includes('.chat.'))])"
            )
            await gateway.until(lambda: gateway.sessions() == 0)
            assert await page.evaluate("swarmPage.swarm.layers") == LAYERS
        body = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": TOKENS, "temperature": 0}
        whole = (await gateway.http.post("/v1/chat/completions", json={"model": MODEL, **body})).json()
        assert kept["messages"][1]["content"] == whole["choices"][0]["message"]["content"]  # the repair changed nothing


async def test_the_page_needs_no_key_and_asks_for_it() -> None:
    async with gateway_swarm(sockets=True, config=GatewayConfig(api_keys=("secret",))) as gateway:
        url = str(gateway.http.base_url).rstrip("/")
        assert (await gateway.http.get("/v1/models")).status_code == 401
        async with browsed(url, allowed=("401",)) as watched:
            await expect(watched.page.locator("#key-why")).to_contain_text("API key")
            await watched.page.fill("#key-input", "secret")
            await watched.page.keyboard.press("Enter")
            await expect(watched.page.locator("#health")).to_have_text("3 nodes, every layer served")
