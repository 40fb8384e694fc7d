"""A real browser on the console's page: Debian's Chromium, which may talk to the tested server and to nobody else."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, sync_playwright

PATIENCE_MS = 60_000.0
SIZE = {"width": 1280, "height": 800}
_QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
_LOW_CONTRAST = (Path(__file__).parent / "contrast.js").read_text()


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser; without one the test is skipped, except where CI promises one."""
    path = shutil.which("chromium")
    if path is None:
        assert os.environ.get("CI") != "true", "CI has no Chromium: apt-get install chromium"
        pytest.skip("no chromium on the path: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_QUIET))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """A page that is open, and what it did wrong so far."""

    page: Page
    strangers: list[str] = field(default_factory=list)  # addresses outside the server
    complaints: list[str] = field(default_factory=list)  # of the browser's console

    def text(self, selector: str) -> str:
        return self.page.locator(selector).last.inner_text()

    def low_contrast(self) -> list[str]:
        """Texts that are too pale on what is behind them, each with its contrast."""
        found: list[str] = self.page.evaluate(_LOW_CONTRAST)
        return found

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true. (Playwright's own way needs eval, which the page forbids.)"""
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}; complaints: {self.complaints}"
            self.page.wait_for_timeout(20)


@contextmanager
def visiting(browser: Browser, url: str, *, refusals: bool = False, **options: Any) -> Iterator[Visit]:
    """Open the console. At the end it must have asked nobody else, and said nothing in the browser's console.

    `refusals`: the test makes the server refuse, which Chromium writes there by itself.
    """
    context = browser.new_context(viewport=options.pop("viewport", SIZE), **options)
    context.set_default_timeout(PATIENCE_MS)
    visit = Visit(context.new_page())

    def watch(route: Route) -> None:
        if route.request.url.startswith(url + "/"):
            route.continue_()
        else:
            visit.strangers.append(route.request.url)
            route.abort()

    context.route("**/*", watch)
    visit.page.on("console", lambda message: visit.complaints.append(message.text))
    visit.page.on("pageerror", lambda error: visit.complaints.append(str(error)))
    try:
        visit.page.goto(url + "/")
        yield visit
    finally:
        context.close()
    assert visit.strangers == []
    left = [text for text in visit.complaints if not (refusals and text.startswith("Failed to load resource"))]
    assert left == []
