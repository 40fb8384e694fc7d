"""serve.toml and the options of `ostinato serve`: what wins, what is refused, and that the example says what holds."""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from ostinato.engines.errors import RecipeError
from ostinato.runtime.config import RuntimeConfig
from ostinato.runtime.serve_config import ServeConfig, is_loopback
from ostinato.runtime.serve_limits import ServeLimits
from ostinato.runtime.serve_options import config_of, serve_parser

EXAMPLE = Path(__file__).parents[2] / "deploy" / "serve.toml"


def from_file(folder: Path, text: str, *options: str) -> ServeConfig:
    (folder / "serve.toml").write_text(text)
    return config_of(serve_parser().parse_args(["--config", str(folder / "serve.toml"), *options]))


def test_the_example_is_the_defaults_and_shows_every_key() -> None:
    text = EXAMPLE.read_text()
    assert config_of(serve_parser().parse_args(["--config", str(EXAMPLE)])) == ServeConfig()
    written = tomllib.loads(re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE))
    assert set(written) == {field.name for field in fields(ServeConfig)}
    assert set(written["limits"]) == {field.name for field in fields(ServeLimits)}
    assert set(written["engine"]) == {field.name for field in fields(RuntimeConfig)}


def test_without_a_file_only_this_machine_can_call() -> None:
    config = config_of(serve_parser().parse_args(["bundle"]))
    assert config == ServeConfig(bundle=Path("bundle"))
    assert (config.host, config.metrics_host) == ("127.0.0.1", "127.0.0.1")
    config.check_exposure(has_keys=False)


def test_options_win_over_set_and_set_over_the_file(tmp_path: Path) -> None:
    text = """
    bundle = "model"
    api_keys = "/etc/keys"
    port = 1
    host = "10.0.0.1"
    metrics_port = "off"
    cors_origins = ["https://a.example"]
    log_format = "json"
    [limits]
    max_waiting = 3
    wait_seconds = 2
    max_total_tokens = 100
    [engine]
    max_rows = 4
    prefix_cache = false
    """
    config = from_file(tmp_path, text)
    assert (config.bundle, config.api_keys) == (tmp_path / "model", Path("/etc/keys"))
    assert (config.port, config.metrics_port, config.cors_origins) == (1, None, ("https://a.example",))
    assert config.limits == ServeLimits(max_waiting=3, wait_seconds=2.0, max_total_tokens=100)
    assert config.engine == RuntimeConfig(max_rows=4, prefix_cache=False)
    options = ["other", "--set", "limits.max_waiting=9", "--set", "limits.max_total_tokens=off", "--set", "port=2"]
    options += ["--set", "log_format=human", "--port", "3", "--prefix-cache", "on", "--metrics-port", "4"]
    config = from_file(tmp_path, text, *options, "--cors-origin", "http://b:1", "--cors-origin", "http://c")
    assert (config.bundle, config.port, config.metrics_port) == (Path("other"), 3, 4)
    assert (config.limits.max_waiting, config.limits.wait_seconds, config.limits.max_total_tokens) == (9, 2.0, None)
    assert (config.log_format, config.cors_origins) == ("human", ("http://b:1", "http://c"))
    assert config.engine == RuntimeConfig(max_rows=4, prefix_cache=True)


@pytest.mark.parametrize("name", [field.name for field in fields(ServeLimits)])
def test_every_limit_can_be_set(tmp_path: Path, name: str) -> None:
    config = from_file(tmp_path, f"[limits]\n{name} = 3")
    assert asdict(config.limits) == asdict(ServeLimits()) | {name: 3}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prot = 1", "unknown key prot: is port meant"),
        ("[limits]\nmax_wait = 1", "unknown key limits.max_wait: is limits.max_waiting meant"),
        ("[engine]\nthreads = 1", "unknown key engine.threads: is engine.num_threads meant"),
        ("[server]\nport = 1", "unknown key server"),
        ("limits = 3", r"write a table \[limits\]"),
        ('port = "1"', "port is '1': give an integer"),
        ("port = true", "port is True: give an integer"),
        ("port = 70000", "port is 70000: give 0 to 65535"),
        ("metrics_port = 1.5", 'metrics_port is 1.5: give an integer, or "off"'),
        ('port = "off"', "port is 'off': give an integer"),
        ("insecure = 1", "insecure is 1: give true or false"),
        ('[engine]\njump_ahead = "off"', "engine.jump_ahead is 'off': give true or false"),
        ("host = 1", "host is 1: give a string"),
        ('host = "a\\u0000b"', r"host is 'a\\x00b': give it without"),
        ('api_keys = "a\\u0000b"', "give it without"),
        ('cors_origins = "https://a"', "cors_origins is 'https://a': give a list of strings"),
        ('cors_origins = ["*"]', "there is no origin for all"),
        ('cors_origins = ["null"]', "there is no origin for all"),
        ('cors_origins = ["https://a.example/"]', "without a path"),
        ('log_format = "xml"', "log_format is 'xml': give one of human, json"),
        ("[limits]\nmax_waiting = -1", "limits.max_waiting is -1: give 0 or more"),
        ("[limits]\nwait_seconds = nan", "limits.wait_seconds is nan: give a number"),
        ("[limits]\nwait_seconds = inf", "limits.wait_seconds is inf: give a number"),
        ("[limits]\nmax_waiting = 1.5", "limits.max_waiting is 1.5: give an integer"),
        ("[limits]\nmax_rows_per_tenant = 0", "limits.max_rows_per_tenant is 0, with which nothing would go on"),
        ("[limits]\nrequests_per_minute_per_key = 0", "limits.requests_per_minute_per_key is 0, with which nothing"),
        ("[limits]\nbeat_seconds = 0", "limits.beat_seconds is 0, with which nothing"),
        ("[limits]\nmax_stops = 5", "limits.max_stops is 5, an engine takes 4"),
        ("[limits]\nmax_top_logprobs = 21", "limits.max_top_logprobs is 21, an engine takes 20"),
        ("[engine]\nmax_rows = 0", "max_rows is 0"),
        ("port 1", "is not TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(RecipeError, match=complaint):
        from_file(tmp_path, text)


def test_a_file_that_is_not_there_and_a_bad_override_are_named(tmp_path: Path) -> None:
    parser = serve_parser()
    for options, complaint in (
        (["--config", str(tmp_path / "no.toml")], "no configuration at"),
        (["--set", "port"], "--set 'port' has no value"),
        (["--set", "port=1", "--set", "port.x=2"], "port is not a table"),
        (["--metrics-port", "x"], "metrics_port is 'x'"),
    ):
        with pytest.raises(RecipeError, match=complaint):
            config_of(parser.parse_args(options))


@pytest.mark.parametrize(
    ("changes", "has_keys", "is_refused"),
    [
        ({}, False, False),
        ({"host": "::1"}, False, False),
        ({"host": "localhost"}, False, False),
        ({"host": "0.0.0.0"}, False, True),
        ({"host": "::"}, False, True),
        ({"host": ""}, False, True),
        ({"host": "192.168.1.2"}, False, True),
        ({"host": "box.example"}, False, True),
        ({"host": "0.0.0.0"}, True, False),
        ({"host": "0.0.0.0", "insecure": True}, False, False),
        ({"metrics_host": "0.0.0.0"}, False, True),
        ({"metrics_host": "0.0.0.0", "metrics_port": None}, False, False),
        ({"metrics_host": "0.0.0.0"}, True, False),
    ],
)
def test_other_machines_need_a_key_or_leave(changes: dict[str, Any], has_keys: bool, is_refused: bool) -> None:
    config = ServeConfig(**changes)
    if is_refused:
        with pytest.raises(RecipeError, match=r"open to other machines.*--api-keys.*--insecure"):
            config.check_exposure(has_keys)
    else:
        config.check_exposure(has_keys)


def test_origins_are_of_sites_and_of_apps() -> None:
    for origin in (
        "https://a.example",
        "http://localhost:3000",
        "http://[::1]:1",
        "app://obsidian.md",
        "tauri://localhost",
    ):
        assert ServeConfig(cors_origins=(origin,)).cors_origins == (origin,)
    for origin in ("*", "null", "", "https://", "https://A.example", "a.example", "https://a.example/x", "https://*.a"):
        with pytest.raises(RecipeError, match="cors_origins has"):
            ServeConfig(cors_origins=(origin,))


def test_names_that_only_look_like_this_machine_are_not() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert not any(is_loopback(host) for host in ("127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0", "::"))
