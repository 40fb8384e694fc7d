"""The console in a real browser: type, stream, stop, see rows come and go, by mouse and by keyboard, light and dark."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from ostinato.runtime.keys import Key, Keys
from tests.browser import Visit, chromium, visiting
from tests.fakes import make_limits
from tests.phrase import PHRASE, PhraseLM
from tests.serving import Running, serving

LIMITS = make_limits(max_rows=4, max_step_tokens=64, max_context=8192, num_blocks=600)
FRAME = len("user:\nassistant:")
ENDLESS = "8000"
SECRET = "a key for the console 4711"

pytestmark = pytest.mark.xdist_group("browser")  # one Chromium is enough


def spoken(prompt: str, num_tokens: int, before: str = "") -> str:
    """What PhraseLM says to a one-turn conversation, with `before` in front of the turn."""
    start = len(before) + FRAME + len(prompt) - 1
    return "".join(chr(PHRASE[(start + i) % len(PHRASE)]) for i in range(num_tokens))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def model() -> PhraseLM:
    return PhraseLM()


@pytest.fixture
def server(tmp_path: Path, model: PhraseLM) -> Iterator[Running]:
    with serving(tmp_path, LIMITS, model) as server:
        yield server


def ask(visit: Visit, text: str, **knobs: str) -> None:
    """Fill the form in and send it."""
    page = visit.page
    page.locator("#knobs").evaluate("knobs => { knobs.open = true; }")
    for name, value in knobs.items():
        page.locator(f"[name={name}]").fill(value)
    page.locator("#prompt").fill(text)
    page.locator("#send-call").click()


def test_text_streams_and_its_row_comes_and_leaves(browser: Browser, server: Running) -> None:
    with visiting(browser, server.metrics_url) as visit:
        ask(visit, "sing", max_tokens=ENDLESS)
        visit.until("document.querySelector('#rows tr[data-state=decode]')")
        visit.until("document.querySelector('.assistant .text').textContent.length > 5")
        before = visit.text(".assistant .text")
        visit.until(f"document.querySelector('.assistant .text').textContent.length > {len(before) + 20}")
        assert visit.page.locator("#send-call").is_disabled()
        assert visit.page.locator("#log").get_attribute("aria-busy") == "true"
        visit.until("document.querySelector('#blocks').getAttribute('aria-label').match(/[1-9]\\d* private/)")
        visit.page.locator("#stop-call").click()
        server.await_idle()
        visit.until("!document.querySelector('#rows tr')")
        assert visit.text("#call").endswith("stopped")
        text = visit.text(".assistant .text")
        assert len(text) > len(before)
        assert spoken("sing", len(text)) == text


def test_a_whole_answer_its_numbers_and_its_spans(browser: Browser, server: Running, model: PhraseLM) -> None:
    model.pace = 0.0
    with visiting(browser, server.metrics_url) as visit:
        ask(visit, "sing", max_tokens="100", stop="")
        visit.until("document.querySelector('#call').textContent.endsWith('length')")
        text = visit.page.locator(".assistant .text").evaluate("node => node.textContent")
        assert text == spoken("sing", 100)  # with its markup as text
        assert "first token" in visit.text("#call")
        assert "100 tokens" in visit.text("#call")
        visit.page.locator("#call-spans summary").click()
        assert "decode_execute" in visit.text("#call-spans table")
        visit.until("document.querySelector('#spans li')")
        assert f"{FRAME + 4} + 100 tokens" in visit.text("#span-caption")
        assert "decode_execute" in visit.text("#span-numbers")
        assert visit.page.locator("#steps .line").count() >= 2
        visit.until("document.querySelector('#latency figure:nth-child(2) .hint').textContent.includes('ms')")
        ask(visit, "again", max_tokens="8")  # the conversation goes on: two turns and their answer
        visit.until("document.querySelector('#call').textContent.includes('8 tokens')")
        num_prompt = len("user:sing\nassistant:" + text + "\nuser:again\nassistant:")
        assert f"prompt {num_prompt}" in visit.text("#call")


def test_knobs_reach_the_server(browser: Browser, server: Running, model: PhraseLM) -> None:
    model.pace = 0.0
    with visiting(browser, server.metrics_url) as visit:
        whole = spoken("sing", 60, "system:loud\n")
        stop = whole[12:15]
        knobs = {"temperature": "0", "top_p": "0.5", "top_k": "3", "min_p": "0.1", "seed": "7"}
        penalties = {"presence_penalty": "0.1", "frequency_penalty": "0.1", "repetition_penalty": "1.1"}
        with visit.page.expect_request("**/v1/chat/completions") as sent:
            ask(visit, "sing", max_tokens="60", stop=stop, system="loud", **knobs, **penalties)
        body = sent.value.post_data_json
        assert body is not None
        assert {name: float(value) for name, value in (knobs | penalties).items()} == {
            name: body[name] for name in knobs | penalties
        }
        assert body["stop"] == [stop]
        assert body["messages"] == [{"role": "system", "content": "loud"}, {"role": "user", "content": "sing"}]
        visit.until("document.querySelector('#call').textContent.endsWith('stop')")
        text = visit.page.locator(".assistant .text").evaluate("node => node.textContent")
        assert text == whole[: whole.index(stop)] != ""


def test_keys_alone_are_enough(browser: Browser, server: Running) -> None:
    with visiting(browser, server.metrics_url) as visit:
        visit.until("!document.querySelector('#send-call').disabled")
        keyboard = visit.page.keyboard
        keyboard.press("Tab")
        assert visit.page.evaluate("document.activeElement.className") == "skip"
        keyboard.press("Enter")
        visit.until("document.activeElement.id === 'prompt'")
        keyboard.type("sing")
        keyboard.press("Tab")
        ring = "getComputedStyle(document.activeElement).outlineStyle"
        assert visit.page.evaluate("document.activeElement.id") == "send-call"  # Stop is off, so it is left out
        assert visit.page.evaluate(ring) == "solid"
        keyboard.press("Tab")
        keyboard.press("Enter")  # opens the knobs
        keyboard.press("Tab")
        assert visit.page.evaluate("document.activeElement.name") == "temperature"
        for _ in range(4):
            keyboard.press("Tab")
        assert visit.page.evaluate("document.activeElement.name") == "max_tokens"
        keyboard.type(ENDLESS)
        keyboard.press("Control+Enter")
        visit.until("document.querySelector('.assistant .text')?.textContent.length > 3")
        keyboard.press("Escape")
        server.await_idle()
        visit.until("document.querySelector('#call').textContent.endsWith('stopped')")
        visit.until("document.querySelector('#spans li')")
        visit.page.locator("#spans li").first.focus()
        assert visit.page.evaluate(ring) == "solid"
        assert "abort" in visit.text("#span-caption")


def test_errors_are_told_as_text(browser: Browser, server: Running, model: PhraseLM) -> None:
    with visiting(browser, server.metrics_url, refusals=True) as visit:
        ask(visit, "sing", stop="a\nb\nc\nd\ne")
        visit.until("document.querySelector('.error')")
        assert "400: stop has 5 strings" in visit.text(".error .text")
        assert visit.page.locator("#prompt").input_value() == "sing"  # to be sent again
        model.is_bad = True
        ask(visit, "sing", stop="")
        visit.until("document.querySelectorAll('.error').length === 2")
        assert "the step failed inside the server" in visit.text(".error .text")
        ask(visit, "sing", schema="{")
        assert "not valid JSON" in visit.text("#call")
        ask(visit, "sing", schema="", temperature="1000")
        assert visit.text("#call").startswith("temperature")
        assert visit.page.locator(".error").count() == 2  # the last two were not sent
        model.is_bad = False
        ask(visit, "sing", temperature="", max_tokens="5")
        visit.until("document.querySelector('.assistant')")
        visit.until("document.querySelector('#call').textContent.endsWith('length')")
        assert len(visit.text(".assistant .text").rstrip("♩")) == 5


def test_a_key_opens_the_playground_and_is_not_kept(browser: Browser, tmp_path: Path) -> None:
    keys = Keys([Key("alice", hashlib.sha256(SECRET.encode()).digest(), "alice")])
    with (
        serving(tmp_path, LIMITS, PhraseLM(), keys=keys) as server,
        visiting(browser, server.metrics_url, refusals=True) as visit,
    ):
        ask(visit, "sing", max_tokens="5")
        visit.until("document.querySelector('.error')")
        assert "401" in visit.text(".error .text")
        ask(visit, "sing", key=SECRET)
        visit.until("document.querySelector('#call').textContent.endsWith('length')")
        kept = "JSON.stringify([Object.entries(localStorage), Object.entries(sessionStorage), document.cookie])"
        assert SECRET not in visit.page.evaluate(kept)
        assert SECRET not in visit.page.content()


def test_an_answer_after_a_schema(browser: Browser, server: Running) -> None:
    schema = '{"type": "object", "properties": {"note": {"enum": ["do", "re"]}}, "required": ["note"]}'
    with visiting(browser, server.metrics_url) as visit:
        ask(visit, "sing", schema=schema[:-1] + ', "additionalProperties": false}', max_tokens="60")
        visit.until("document.querySelector('#call').textContent.endsWith('stop')")
        text = visit.page.locator(".assistant .text").evaluate("node => node.textContent")
        assert json.loads(text)["note"] in ("do", "re")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_can_be_read(browser: Browser, server: Running, scheme: str) -> None:
    with visiting(browser, server.metrics_url, refusals=True, color_scheme=scheme) as visit:
        ask(visit, "sing", stop="a\nb\nc\nd\ne")
        ask(visit, "sing", stop="", max_tokens="40")
        visit.until("document.querySelector('#spans li')")
        ask(visit, "sing", max_tokens=ENDLESS)
        visit.until("document.querySelector('#rows tr[data-state=decode]')")
        paper = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert visit.low_contrast() == []
        for name in ("light", "dark"):
            visit.page.locator("#theme").click()
            assert name in visit.text("#theme")
            chosen = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (chosen == paper) == (name == scheme)
        visit.page.locator("#stop-call").click()
        server.await_idle()


def test_nothing_is_cut_off_at_any_width(browser: Browser, server: Running) -> None:
    inside = """[...document.querySelectorAll('article, .playground, header, button, canvas')].filter(node => {
        const box = node.getBoundingClientRect();
        return box.left < 0 || box.right > innerWidth;
    }).map(node => node.outerHTML.slice(0, 80))"""
    with visiting(browser, server.metrics_url) as visit:
        ask(visit, "sing", max_tokens=ENDLESS)
        visit.until("document.querySelector('#rows tr')")
        for width in (700, 820, 1000, 1100, 1280, 1900):
            visit.page.set_viewport_size({"width": width, "height": 800})
            assert visit.page.evaluate(inside) == [], width
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        visit.page.locator("#stop-call").click()
        server.await_idle()


def test_who_wants_no_motion_gets_none(browser: Browser, server: Running) -> None:
    moves = "document.getAnimations().length"
    with visiting(browser, server.metrics_url) as visit:
        ask(visit, "sing", max_tokens=ENDLESS)
        visit.until(f"document.querySelector('#rows tr[data-state=decode] .notes g') && {moves} > 0")
        visit.page.emulate_media(reduced_motion="reduce")
        visit.until(f"{moves} === 0")
        visit.page.locator("#stop-call").click()
        server.await_idle()


def test_a_page_that_finds_no_server_says_so(browser: Browser, tmp_path: Path) -> None:
    with ExitStack() as stack:
        with serving(tmp_path, LIMITS, PhraseLM()) as server:
            visit = stack.enter_context(visiting(browser, server.metrics_url, refusals=True))
            visit.until("document.querySelector('#contact').textContent === 'ready'")
        visit.until("document.querySelector('#contact').textContent === 'no contact with the server'")


def test_many_callers_are_seen_in_the_queue(browser: Browser, server: Running) -> None:
    stop = threading.Event()

    def call() -> None:
        body = {"model": "toy", "prompt": "sing", "max_tokens": 8000, "stream": True}
        with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
            for _ in response.iter_bytes():
                if stop.is_set():
                    return

    with visiting(browser, server.metrics_url) as visit, ThreadPoolExecutor(7) as pool:
        calls = [pool.submit(call) for _ in range(7)]
        try:
            visit.until("document.querySelectorAll('#rows tr').length === 7")
            assert visit.page.locator("#rows tr[data-state=queue]").count() == 3
            assert visit.text("#rows-note") == "4 running, 3 waiting"
            visit.until("document.querySelector('#queue-note').textContent === '3 waiting'")
            assert "slots\n3" in visit.text("#queue")
        finally:
            stop.set()
        for done in calls:
            done.result()
        visit.until("document.querySelectorAll('#rows tr').length === 0")
