"""A page of the gateway in a headless Chromium, for the tests that need one."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from page_fakes import FakeGateway, served
from playwright.async_api import Page, async_playwright, expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
NEEDS_CHROMIUM = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")]
expect.set_options(timeout=20_000)  # milliseconds; the machine may be busy
QUESTION = "How does the swarm run a model that fits on no single machine?"


def pieces(text: str, size: int = 5) -> list[dict[str, Any]]:
    return [{"content": text[start : start + size]} for start in range(0, len(text), size)]


class Watched:
    """A page, and whatever went wrong in it."""

    def __init__(self, page: Page, problems: list[str], requests: list[str]) -> None:
        self.page, self.problems, self.requests = page, problems, requests


@asynccontextmanager
async def opened(gateway: FakeGateway, *size: int, **settings: Any) -> AsyncIterator[Watched]:
    async with served(gateway) as url, browsed(url, *size, **settings) as watched:
        yield watched


@asynccontextmanager
async def browsed(
    url: str, width: int = 1440, height: int = 900, allowed: tuple[str, ...] = (), **settings: Any
) -> AsyncIterator[Watched]:
    """`allowed`: in console messages that are expected. At the end there must be no others, no error and no violation
    of the security policy, and nothing may have been asked of another host."""
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM)
        context = await browser.new_context(viewport={"width": width, "height": height}, **settings)
        page = await context.new_page()
        watched = Watched(page, [], [])
        page.on("console", lambda message: watched.problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: watched.problems.append(f"error: {error}"))
        page.on("request", lambda request: watched.requests.append(request.url))
        await page.add_init_script(
            "document.addEventListener('securitypolicyviolation', e => console.error(e.violatedDirective))"
        )
        await page.goto(url)
        yield watched
        await browser.close()
        unexpected = [line for line in watched.problems if not any(part in line for part in allowed)]
        assert unexpected == []
        assert [address for address in watched.requests if not address.startswith(url)] == []


async def shot(page: Page, tmp_path: Path, name: str) -> None:
    folder = Path(os.environ.get("SWARM_PAGE_SHOTS", tmp_path))
    picture = await page.screenshot(path=folder / f"{name}.png")  # makes the folder, too
    assert len(picture) > 10_000


async def ask(page: Page, text: str = QUESTION) -> None:
    await page.fill("#ask", text)
    await page.keyboard.press("Enter")
