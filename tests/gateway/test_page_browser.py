"""The page in a real headless Chromium, before a gateway that a test directs. Skipped where there is no Chromium.

`SWARM_PAGE_SHOTS=FOLDER` keeps the screenshots; `docs/images/page.png` is `docs.png` of them.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from page_browser import NEEDS_CHROMIUM, ask, opened, pieces, shot
from page_fakes import FakeGateway, fake_node, large_swarm, small_swarm
from playwright.async_api import expect

pytestmark = NEEDS_CHROMIUM

ANSWER = """A pipeline cuts the model into **spans** of layers:

1. each node loads *only* its layers,
2. hidden states travel from hop to hop,
3. the last hop samples a token.

```python
for hop in chain:
    hidden = hop.forward(hidden)
```

If a node disappears, another one replays what it missed, and the answer goes on where it stopped."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_ask_lose_a_node_and_see_the_repair(tmp_path: Path, scheme: Any) -> None:
    gateway = FakeGateway(small_swarm())
    gateway.script = [{"reasoning_content": "They ask how it works. "}, *pieces(ANSWER)]
    gateway.hold = 40
    async with opened(gateway, color_scheme=scheme) as watched:
        page = watched.page
        await expect(page.locator("#health")).to_have_text("7 nodes, every layer served")
        await ask(page)
        await expect(page.locator(".assistant .body")).to_contain_text("each node loads only")  # tokens come
        await expect(page.locator(".mine .state")).to_have_text("writing")
        assert await page.locator(".mine .hop b").all_inner_texts() == ["anna-desktop", "lab-07", "garage"]
        gateway.kill("12D3KooW0001", "12D3KooW0004", "KooW0001 [10:20] replaced by KooW0004 [10:20]")
        gateway.nodes["12D3KooW0007"] = fake_node(7, 20, 30)
        gateway.nodes["12D3KooW0003"].update(start=5, end=15)
        moved = {"peer": "12D3KooW0003", "from": [0, 10], "to": [5, 15]}
        gateway.change(joined=[gateway.nodes["12D3KooW0007"]], moved=[moved])
        await expect(page.locator(".mine .repairs li")).to_have_text("lab-07 [10:20] replaced by studio [10:20]")
        assert await page.locator(".mine .hop b").all_inner_texts() == ["anna-desktop", "studio", "garage"]
        events = page.locator("#events")
        for sentence in ("lab-07 is gone, 10–20", "kitchen joins, 20–30", "mac-mini moves from 0–10 to 5–15"):
            await expect(events).to_contain_text(sentence)
        await shot(page, tmp_path, f"{scheme}-repair")
        if scheme == "light":
            await page.set_viewport_size({"width": 1280, "height": 760})
            await shot(page, tmp_path, "docs")
        gateway.go.set()
        await expect(page.locator("#send")).to_be_visible()
        assert (await page.locator(".assistant .body").inner_text()).endswith("goes on where it stopped.")
        await expect(page.locator(".assistant .note")).to_contain_text(f"{len(gateway.script)} tokens")
        await expect(page.locator(".assistant .note")).to_contain_text("tok/s · first token")
        await expect(page.locator(".assistant .thought summary")).to_have_text("Reasoning")
        await expect(page.locator(".mine .state")).to_have_text("complete")
        await page.reload()  # the conversation is kept
        await expect(page.locator(".assistant .body")).to_contain_text("goes on where it stopped.")


async def test_a_telephone(tmp_path: Path) -> None:
    gateway = FakeGateway(small_swarm())
    gateway.script = pieces(ANSWER)
    async with opened(gateway, 390, 844, device_scale_factor=2, has_touch=True, is_mobile=True) as watched:
        page = watched.page
        await ask(page)
        await expect(page.locator("#send")).to_be_visible()
        await shot(page, tmp_path, "narrow-chat")
        await page.tap("#to-swarm")
        await expect(page.locator("#map-canvas")).to_be_visible()
        await page.locator("#map-canvas").tap(position={"x": 60, "y": 80})
        await expect(page.locator("#node")).to_contain_text("anna-desktop")
        await shot(page, tmp_path, "narrow-map")
        await page.tap("#as-table")
        await expect(page.locator("#nodes")).to_be_visible()
        await page.tap("#list-open")
        await expect(page.locator("#list #new")).to_be_in_viewport(ratio=1)
        await shot(page, tmp_path, "narrow-list")
        await page.keyboard.press("Escape")
        await expect(page.locator("#list #new")).not_to_be_in_viewport()
        await expect(page.locator("#list-open")).to_be_focused()
        await page.tap("#list-open")
        await page.tap("#new")
        await expect(page.locator("#welcome")).to_be_in_viewport()
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390


async def test_by_keyboard_alone() -> None:
    gateway = FakeGateway(small_swarm())
    gateway.script = pieces(ANSWER)
    gateway.hold = 3
    async with opened(gateway, reduced_motion="reduce") as watched:
        page = watched.page
        await expect(page.locator("#health")).to_contain_text("every layer served")
        await expect(page.locator("#ask")).to_be_focused()
        await page.keyboard.type("first line")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("second line")
        await page.keyboard.press("Enter")
        await expect(page.locator("#stop")).to_be_visible()
        await expect(page.locator(".assistant .body")).to_contain_text("A pipeline")
        await page.keyboard.press("Escape")  # stops, and the gateway sees it
        await expect(page.locator("#send")).to_be_visible()
        await expect(page.locator(".assistant .note")).to_contain_text("stopped")
        assert gateway.requests[0]["messages"] == [{"role": "user", "content": "first line\nsecond line"}]
        order = []
        await page.focus(".skip")
        for _ in range(18):
            await page.keyboard.press("Tab")
            order.append(await page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        expected = [
            "models",
            "settings-open",
            "theme",
            "new",
            "first line second line",
            "×",
            "Edit",
            "Copy",
            "Retry",
            "ask",
        ]
        places = [order.index(name) for name in [*expected, "send", "as-map", "as-table", "map-canvas"]]
        assert places == sorted(places)
        await page.focus("#map-canvas")
        await page.keyboard.press("ArrowRight")
        await expect(page.locator("#node")).to_contain_text("anna-desktop")
        await page.keyboard.press("End")
        await expect(page.locator("#node")).to_contain_text("attic")
        await page.focus("#theme")
        for theme in ("light", "dark"):
            await page.keyboard.press("Enter")
            assert await page.evaluate("document.documentElement.dataset.theme") == theme
    assert gateway.cancelled == 1


async def test_settings_retry_edit_and_system_prompt(tmp_path: Path) -> None:
    gateway = FakeGateway(small_swarm())
    async with opened(gateway) as watched:
        page = watched.page
        await page.click("#settings-open")
        await page.fill("[name=system]", "Be brief.")
        await page.fill("[name=temperature]", "7")
        await page.click("text=Save")
        await expect(page.locator("#settings-error")).to_have_text("Temperature must be a number from 0 to 2.")
        for name, text in (
            ("temperature", "0.5"),
            ("min_p", "0.1"),
            ("seed", "7"),
            ("stop", "END\n###"),
            ("schema", "{"),
        ):
            await page.fill(f"[name={name}]", text)
        await page.click("text=Save")
        await expect(page.locator("#settings-error")).to_contain_text("The JSON schema is not JSON")
        await page.fill("[name=schema]", '{"type": "object"}')
        await shot(page, tmp_path, "settings")
        await page.click("text=Save")
        await expect(page.locator("#settings-count")).to_have_text("5")
        await page.select_option("#models", "qwen3-8b")
        await ask(page, "one")
        await expect(page.locator(".assistant .body")).to_have_text("Hello.")
        sent = gateway.requests[-1]
        assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
        assert (sent["model"], sent["temperature"], sent["min_p"], sent["seed"]) == ("qwen3-8b", 0.5, 0.1, 7)
        assert (sent["stop"], sent["response_format"]["json_schema"]["schema"]) == (["END", "###"], {"type": "object"})
        assert (sent["stream"], sent["stream_options"]) == (True, {"include_usage": True})
        assert "top_p" not in sent
        await page.click("text=Retry")
        await expect(page.locator("#send")).to_be_visible()
        assert gateway.requests[-1]["messages"] == sent["messages"]
        await page.click("text=Edit")
        await page.fill(".edit textarea", "two")
        await page.keyboard.press("Enter")
        await expect(page.locator(".user .body")).to_have_text("two")
        await expect(page.locator(".assistant .note")).to_contain_text("1 tokens")
        assert gateway.requests[-1]["messages"][1] == {"role": "user", "content": "two"}
        await page.click("#new")
        await expect(page.locator("#welcome")).to_be_visible()
        await page.locator("#conversations .open").click()
        await expect(page.locator(".user .body")).to_have_text("two")


async def test_tool_calls_are_shown_and_can_be_answered() -> None:
    gateway = FakeGateway(small_swarm())
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    more = [{"index": 0, "function": {"arguments": text}} for text in ('{"city": ', '"<b>Oslo</b>"}')]
    gateway.script = [{"tool_calls": [call]}, *({"tool_calls": [piece]} for piece in more)]
    async with opened(gateway) as watched:
        page = watched.page
        await ask(page)
        await expect(page.locator(".call pre")).to_have_text('{\n  "city": "<b>Oslo</b>"\n}')
        gateway.script = [{"content": "Rain."}]
        await page.fill(".result input", "4 degrees, rain")
        await page.keyboard.press("Enter")
        await expect(page.locator(".assistant .body").last).to_have_text("Rain.")
        _, asked, answered = gateway.requests[-1]["messages"]
        assert asked["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "<b>Oslo</b>"}'}
        assert answered == {"role": "tool", "content": "4 degrees, rain", "tool_call_id": "call_1"}


@pytest.mark.parametrize("count", [1000])
async def test_a_thousand_nodes_are_drawn(tmp_path: Path, count: int, record_property: Any) -> None:
    """How long an update takes is reported, not asserted: it depends on what else the machine does."""
    gateway = FakeGateway(large_swarm(count), layers=64)
    async with opened(gateway) as watched:
        page = watched.page
        await expect(page.locator("#health")).to_contain_text(f"{count} nodes")
        await page.evaluate(
            """() => {
              const { panel, swarm } = swarmPage;
              const apply = swarm.apply.bind(swarm);
              globalThis.spent = [];
              let began = 0;
              swarm.apply = (...of) => { began = performance.now(); return apply(...of); };
              const update = panel.feed.onUpdate;
              panel.feed.onUpdate = (event) => { update(event); spent.push(performance.now() - began); };
            }"""
        )
        times = {}
        for view in ("map", "table"):
            await page.click(f"#as-{view}")
            for _ in range(10):
                some = list(gateway.nodes.values())[:: 3 if view == "map" else 5]
                for node in some:
                    node["kv_free_tokens"] = int(node["kv_free_tokens"] * 0.9)
                gateway.change(updated=some)
                await asyncio.sleep(0.1)
            await page.wait_for_function("spent.length >= 10")
            times[view] = sorted(await page.evaluate("spent.splice(0)"))
            await shot(page, tmp_path, f"thousand-{view}")
        report = {
            view: {"median_ms": round(all_[len(all_) // 2], 1), "worst_ms": round(all_[-1], 1)}
            for view, all_ in times.items()
        }
        record_property("update", json.dumps(report))
        print("update of 1,000 nodes:", report)
        await expect(page.locator("#nodes tbody tr")).to_have_count(count)
