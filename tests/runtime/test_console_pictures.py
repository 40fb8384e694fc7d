"""The console's pictures for the README: the demo's bundle under some load, light and dark, where a folder is named.

OSTINATO_SCREENSHOTS: the folder. OSTINATO_LOAD_SECONDS: how long the load runs before, 60 by default.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ostinato.runtime.bridge import Bridge
from ostinato.runtime.config import RuntimeConfig
from ostinato.runtime.door import Served
from ostinato.runtime.metrics import Metrics
from ostinato.runtime.server import Server
from ostinato.runtime.server_app import create_app
from ostinato.runtime.shop import open_shop
from tests.browser import chromium, visiting
from tests.serving import ANY_PORTS, await_true

FOLDER = os.environ.get("OSTINATO_SCREENSHOTS")
LOAD_SECONDS = float(os.environ.get("OSTINATO_LOAD_SECONDS", "60"))
BUNDLE = Path(__file__).parents[2] / os.environ.get("OSTINATO_BUNDLE", "engines/store/smollm2-135m")
MAX_BYTES = 300 * 1024
NUM_CALLERS = 7
ENGINE = RuntimeConfig(max_rows=5, max_step_tokens=96)
GUIDE = (
    "You answer questions of visitors to a small museum of musical instruments. Be friendly, be short, and name the "
    "room where the instrument stands. Strings are in the north room, keyboards in the west room, drums in the hall."
)
QUESTIONS = (
    "Where is the oldest cello?", "Tell me a story about a lute.", "What is an ostinato?", "Who built the first piano?",
    "Why do drums have two skins?", "Describe the harp for a child.", "How is a violin bow made?",
)  # fmt: skip


@contextmanager
def demo_server() -> Iterator[Server]:
    """The demo's bundle on any two ports."""

    def load() -> Served:
        shop = open_shop(BUNDLE, ENGINE, lambda *_: None)
        bridge = Bridge(shop.loop, shop.intake, shop.tokenizer, Metrics())
        return Served(shop.bundle.manifest.name, bridge, shop.bundle.manifest)

    server = Server(create_app(load, ANY_PORTS))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        await_true(lambda: server.started and server.door.trouble() is None, "the server did not start")
        yield server
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def load_on(url: str) -> Iterator[None]:
    """Callers who ask again and again until the block ends."""
    stop = threading.Event()

    def ask(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(base_url=url, timeout=120, verify=False) as client:
            while not stop.is_set():
                turn = [{"role": "system", "content": GUIDE}, {"role": "user", "content": rng.choice(QUESTIONS)}]
                body = {"model": BUNDLE.name, "messages": turn, "max_tokens": rng.randrange(20, 120), "stream": True}
                with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    assert response.status_code == 200
                    for _ in response.iter_bytes():
                        if stop.is_set():
                            return

    with ThreadPoolExecutor(NUM_CALLERS) as pool:
        calls = [pool.submit(ask, number) for number in range(NUM_CALLERS)]
        try:
            yield
        finally:
            stop.set()
        for call in calls:
            call.result()


@pytest.mark.model
@pytest.mark.skipif(FOLDER is None, reason="OSTINATO_SCREENSHOTS names no folder")
def test_pictures_of_the_demo() -> None:
    assert FOLDER is not None
    assert BUNDLE.exists(), f"no bundle at {BUNDLE}: make bundle"
    folder = Path(FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    with chromium() as browser, demo_server() as server, load_on(server.url):
        assert server.metrics_url is not None
        time.sleep(LOAD_SECONDS)
        for scheme in ("light", "dark"):
            with visiting(browser, server.metrics_url, color_scheme=scheme) as visit:
                page = visit.page
                visit.until("!document.querySelector('#send-call').disabled")
                page.locator("#prompt").fill("What is the capital of Japan?")
                page.keyboard.press("Control+Enter")
                visit.until("/stop|length/.test(document.querySelector('#call').textContent)")
                page.locator("#prompt").fill("Tell me a story about a violin that could not stop.")
                page.keyboard.press("Control+Enter")
                visit.until("document.querySelectorAll('.assistant .text')[1]?.textContent.length > 260")
                visit.until("document.querySelectorAll('#rows tr').length >= 6")
                path = folder / f"console-{scheme}.png"
                page.screenshot(path=path)
                assert path.stat().st_size <= MAX_BYTES
                page.locator("#stop-call").click()
