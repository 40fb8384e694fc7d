"""API keys: how they are read, what is refused, how they are found, and what each may use."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import pytest

from ostinato.engines.errors import RecipeError
from ostinato.runtime.key_meter import KeyMeter
from ostinato.runtime.keys import ENVIRONMENT, Key, Keys, read_keys
from ostinato.runtime.serve_limits import ServeLimits
from ostinato.runtime.wire_errors import HttpError

ALICE, BOB = "alice-0123456789abcdef", "bob:with-a-colon-0123"


def key(name: str, **options: int) -> Key:
    return Key(name, hashlib.sha256(name.encode()).digest(), name, **options)


def test_keys_come_from_lines_from_toml_and_from_the_environment(tmp_path: Path) -> None:
    lines = tmp_path / "keys.txt"
    lines.write_text(f"# who may call\n\nalice:{ALICE}\n bob : {BOB} \n")
    environment = {ENVIRONMENT: f"carol:{'c' * 16},dave:{'d' * 16}\n", "OTHER": "1"}
    keys = read_keys(lines, environment)
    assert environment == {"OTHER": "1"}  # what this process starts does not inherit them
    assert len(keys) == 4
    for name, text in (("alice", ALICE), ("bob", BOB), ("carol", "c" * 16), ("dave", "d" * 16)):
        found = keys.find(f"Bearer {text}")
        assert found is not None
        assert (found.name, found.tenant) == (name, name)
    table = tmp_path / "keys.toml"
    digest = hashlib.sha256(BOB.encode()).hexdigest()
    table.write_text(
        f'[[keys]]\nname = "alice"\nkey = "{ALICE}"\ntenant = "red"\nmax_concurrent = 2\n'
        f'[[keys]]\nname = "bob"\nsha256 = "{digest}"\ntenant = "red"\nrequests_per_minute = 5\n'
    )
    keys = read_keys(table, {})
    alice, bob = keys.find(f"bearer {ALICE}"), keys.find(f"Bearer {BOB}")
    assert alice is not None
    assert bob is not None
    assert (alice.tenant, alice.max_concurrent, alice.requests_per_minute) == ("red", 2, None)
    assert (bob.tenant, bob.max_concurrent, bob.requests_per_minute) == ("red", None, 5)
    assert keys.caller(alice) == keys.caller(bob)
    assert len(read_keys(None, {})) == 0


@pytest.mark.parametrize(
    "header",
    [
        "", "Bearer", "Bearer ", ALICE, f"Basic {ALICE}", f"Bearer {ALICE[:-1]}", f"Bearer {ALICE}x", f"Bearer{ALICE}",
        f"Bearer {ALICE.upper()}", f"Bearer {ALICE} {ALICE}", "Bearer \udcff", f"Bearer {ALICE}\x00", "Bearer é" * 9,
    ],
)  # fmt: skip
def test_a_key_is_found_by_nothing_else(header: str) -> None:
    keys = Keys([Key("alice", hashlib.sha256(ALICE.encode()).digest(), "alice")])
    assert keys.find(f"Bearer {ALICE}") is not None
    assert keys.find(header) is None


def test_every_key_is_compared_whichever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(left)
        return left == right

    monkeypatch.setattr("ostinato.runtime.keys.hmac.compare_digest", compare)
    keys = Keys([key(f"key-{number}") for number in range(5)])
    for given in ("key-0", "key-4", "none"):
        compared.clear()
        keys.find(f"Bearer {given}")
        assert len(compared) == 5


def test_salts_are_of_one_length_secret_and_a_tenants_own() -> None:
    callers = [Keys([]).caller(key(name)) for name in ("a", "b", "a")]
    assert len({caller.salt for caller in callers}) == 3  # of three processes, so to say
    keys = Keys([])
    assert keys.caller(key("a")) == keys.caller(key("a"))
    assert keys.caller(key("a")).salt != keys.caller(key("b")).salt
    assert {len(keys.caller(key("x" * size)).salt) for size in (1, 64)} == {64}


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("keys.txt", "alice", "entry 1, has no colon"),
        ("keys.txt", "", "has no API key"),
        ("keys.txt", "alice:secret-canary", "can be guessed"),
        ("keys.txt", "alice:secret-canary with a space", "printable ASCII"),
        ("keys.txt", "alice:secret-canary-é-0123456789", "printable ASCII"),
        ("keys.txt", "a b:secret-canary-0123456789", "no good name"),
        ("keys.txt", "a:secret-canary-0123456789\na:secret-canary-9876543210", "the same name"),
        ("keys.txt", "a:secret-canary-0123456789\nb:secret-canary-0123456789", "the same key"),
        ("keys.toml", "secret-canary", "is not TOML"),
        ("keys.toml", "[keys]\nalice = 'secret-canary'", "other things than"),
        ("keys.toml", "[[keys]]\nname = 'a'\nkye = 'secret-canary-0123456789'", "has kye"),
        ("keys.toml", "keys = ['secret-canary-0123456789']", "key 1, is no table"),
        ("keys.toml", "[[keys]]\nname = 'a'", "needs either key or sha256"),
        ("keys.toml", "[[keys]]\nname = 'a'\nsha256 = 'secret-canary'", "64 digits"),
        ("keys.toml", "[[keys]]\nname = 'a'\nkey = 'secret-canary-0123456789'\nmax_concurrent = 0", "give 1 or more"),
        ("keys.toml", "[[keys]]\nname = 'a'\nkey = 'secret-canary-0123456789'\ntenant = ''", "no good tenant"),
    ],
)
def test_bad_keys_are_refused_without_being_repeated(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError, match=complaint) as refused:
        read_keys(tmp_path / name, {})
    assert "secret-canary" not in str(refused.value)


def test_a_key_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no API keys at .*No such file"):
        read_keys(tmp_path / "keys.txt", {})


def test_calls_at_once_are_counted_by_key_and_given_back_however_they_end() -> None:
    meter = KeyMeter(ServeLimits(max_concurrent_per_key=2))
    wide = key("wide", max_concurrent=3)
    with meter.call(key("a")), meter.call(key("a")), meter.call(key("b")), meter.call(wide), meter.call(wide):
        with pytest.raises(HttpError, match="2 calls running") as refused, meter.call(key("a")):
            pass
        assert (refused.value.status, refused.value.retry_seconds) == (429, 1)
        with meter.call(wide), pytest.raises(HttpError), meter.call(wide):
            pass
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), meter.call(key("a")):
            raise error
    with meter.call(key("a")), meter.call(key("a")):
        pass


@pytest.mark.parametrize("rate", [1, 6, 60, 120])
def test_a_minutes_calls_may_come_at_once_and_then_one_by_one(rate: int) -> None:
    now = [1000.0]
    meter = KeyMeter(ServeLimits(requests_per_minute_per_key=rate), lambda: now[0])

    def calls() -> tuple[int, int]:
        """How many are let in now, of as many as one likes, and after how many seconds the next would be."""
        count = 0
        while True:
            try:
                with meter.call(key("a")):
                    count += 1
            except HttpError as error:
                return count, error.retry_seconds

    assert calls()[0] == rate
    for _ in range(20):
        count, seconds = calls()
        assert (count, seconds) == (0, math.ceil(60 / rate))
        now[0] += seconds  # whoever waits as told is let in
        assert calls()[0] == max(1, rate * seconds // 60)
    now[0] += 3600
    assert calls()[0] == rate  # an idle hour saves no more than a minute's
