"""What `ostinato serve` ends with: 0 after a drain, 1 where the model failed, 2 where what was asked for can't be."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from ostinato.engines.command import main
from ostinato.engines.errors import BundleError
from tests.load.toy_process import Toy, toy_process


def test_0_after_a_drain(tmp_path: Path) -> None:
    with toy_process(tmp_path, Toy()) as server:
        assert server.end() == 0


def test_1_where_the_model_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that turns out to be damaged while it is loaded, say: another try may go well."""

    def fail(*_: Any, **__: Any) -> None:
        raise BundleError("rank0/weights.bin is damaged: copy the bundle again")

    monkeypatch.setattr("ostinato.runtime.shop.check_shop", lambda *_: None)
    monkeypatch.setattr("ostinato.runtime.shop.open_shop", fail)
    assert main(["serve", "somewhere", "--port", "0", "--metrics-port", "off"]) == 1
    assert "ostinato serve: rank0/weights.bin is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [["nowhere"], ["nowhere", "--max-rows", "0"], ["nowhere", "--host", "0.0.0.0"], ["--config", "none.toml"]],
)
def test_2_where_it_can_not_be_and_before_a_line_of_the_server(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ostinato serve: ")


@pytest.mark.parametrize(
    ("options", "environment", "complaint"),
    [
        (["--host", "0.0.0.0"], {}, "host 0.0.0.0 is open to other machines"),
        (["--metrics-host", "0.0.0.0"], {}, "metrics_host 0.0.0.0 is open to other machines"),
        (["--api-keys", "/nowhere/keys"], {}, "no API keys at /nowhere/keys"),
        ([], {"OSTINATO_API_KEYS": "alice:short-canary"}, "can be guessed"),
        (["--set", "limits.max_wating=1"], {}, "unknown key limits.max_wating: is limits.max_waiting meant?"),
        (["--host", "0.0.0.0"], {"OSTINATO_API_KEYS": "alice:" + "k" * 16}, "nobundle"),
        (["--host", "0.0.0.0", "--insecure"], {}, "nobundle"),
    ],
)  # fmt: skip
def test_2_for_what_can_not_be_served_safely(
    options: list[str],
    environment: dict[str, str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "/nobundle", *options]) == 2
    told = capsys.readouterr().err
    assert complaint in told
    assert "canary" not in told
    assert len(told.splitlines()) == 1


def test_2_for_an_option_that_is_not_known() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "nowhere", "--no-such-option"])
    assert ended.value.code == 2


def test_2_for_an_address_that_is_taken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("ostinato.runtime.shop.check_shop", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["serve", "somewhere", "--port", port, "--metrics-port", "off"]) == 2
    assert f"can't listen on 127.0.0.1 port {port}" in capsys.readouterr().err
