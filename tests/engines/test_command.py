"""What a wrong call of the `ostinato` command is told: one line, and exit code 2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from ostinato.engines.argument_parser import ArgumentParser
from ostinato.engines.command import GROUP, main

from . import made

RECIPES = Path(__file__).parents[2] / "engines" / "recipes"


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The line on standard error of a call that ends with 2."""
    try:
        code: object = main(list(argv))
    except SystemExit as ended:  # argparse's way
        code = ended.code
    out, error = capsys.readouterr()
    assert (code, out) == (2, "")
    assert error.strip().count("\n") == 0
    return error.strip()


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ("frob", "ostinato: there is no command 'frob': give one of build, verify, inspect, diff, "),
        ("biuld x.toml", "ostinato: there is no command 'biuld': did you mean build? (`ostinato --help` "),
        (
            "build",
            "ostinato build: RECIPE, a TOML file, such as engines/recipes/….toml, is missing (`ostinato build --h",
        ),
        ("inspect", "ostinato inspect: BUNDLE, a bundle's folder, such as engines/store/NAME, is missing ("),
        ("diff", "ostinato diff: A, a bundle's folder, and B, another's, are missing ("),
        ("chat", "ostinato chat: BUNDLE, a bundle's folder, "),
        ("generate b", "ostinato generate: one of the arguments --prompt --prompt-ids --requests is required ("),
        (
            "build x.toml --frob",
            "ostinato build: there is no option '--frob': did you mean --force? (`ostinato build --help` shows all)",
        ),
        ("build x.toml y.toml", "ostinato build: 'y.toml' is one argument too many ("),
        ("chat b --temprature 1", "ostinato chat: there is no option '--temprature': did you mean --temperature? ("),
        ("generate --promt=x", "ostinato generate: there is no option '--promt': did you mean --prompt? ("),
        (
            "generate b --max-token 8",
            "ostinato generate: there is no option '--max-token': did you mean --max-tokens? (",
        ),
        (
            "serve b --metrics 1",
            "ostinato serve: there is no option '--metrics': did you mean --metrics-host or --metri",
        ),
        ("diagnose x -n5 -m", "ostinato diagnose: there is no option '-m' ("),
        ("verify x.toml --prompts -1 -2", "ostinato verify: '-2' is one argument too many ("),
        (
            "generate b --prompt -hello",
            "ostinato generate: argument --prompt: expected one argument, and one that begins ",
        ),
        ("verify x.toml --prompts -1", "ostinato verify: --prompts is -1: give 1 to 24 ("),
        ("serve b --port x", "ostinato serve: argument --port: invalid int value: 'x' ("),
        ("diagnose", "ostinato diagnose: URL, the server's metrics port, such as http://127.0.0.1:8001, is missing ("),
    ],
)
def test_a_wrong_call_is_told_in_one_line(capsys: pytest.CaptureFixture[str], argv: str, wanted: str) -> None:
    assert told(capsys, *argv.split()).startswith(wanted)


def test_a_folder_that_is_not_what_is_wanted_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made.make(tmp_path / "b")
    found = told(capsys, "plan", str(tmp_path / "b"))
    assert found.startswith(f"ostinato plan: {tmp_path / 'b'} is a folder, wanted is a recipe: give its TOML file, ")
    (tmp_path / "r.toml").write_text('checkpoint = "none"\ntarget = "cpu"\n')
    (tmp_path / "empty").mkdir()
    found = told(capsys, "verify", str(tmp_path / "r.toml"), "--bundle", str(tmp_path / "empty"))
    assert "empty has no manifest.json, so it is no finished bundle: give the folder of one, such as " in found
    found = told(capsys, "verify", str(tmp_path / "r.toml"), "--bundle", str(tmp_path / "none"))
    assert "no bundle at " in found


def test_a_bundle_is_verified_by_the_recipe_of_its_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made.make(tmp_path / "b")
    found = told(capsys, "verify", str(tmp_path / "b"))
    assert re.search(r"engines/recipes has no \S+\.toml: give the recipe that made it", found)
    assert f"`ostinato verify RECIPE --bundle {tmp_path / 'b'}`" in found
    found = told(capsys, "verify", str(tmp_path / "b"), "--bundle", str(tmp_path / "c"))
    assert "is a bundle, and so is" in found


def test_what_stands_where_a_bundle_was_wanted_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostinato.engines.bundle.STORE", tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "demo.toml"
    recipe.write_text('checkpoint = "none"\ntarget = "cpu"\nname = "toy"\n')
    built = "is a recipe, wanted is its bundle: give store/toy"
    missing = "is a recipe, and its bundle is not built: run `ostinato build demo.toml`, then give store/toy"
    for command in ("chat", "inspect"):
        assert told(capsys, command, "demo.toml") == f"ostinato {command}: demo.toml {missing}"
    made.make(tmp_path / "store" / "toy")
    assert told(capsys, "inspect", "demo.toml") == f"ostinato inspect: demo.toml {built}"
    assert told(capsys, "serve", "demo.toml") == f"ostinato serve: demo.toml {built}"
    assert told(capsys, "inspect", "toy").endswith("no bundle at toy: give store/toy")
    assert told(capsys, "inspect", "store").endswith(
        "store is a folder of bundles: give one of them, such as store/toy"
    )
    (tmp_path / "serve.toml").write_text("port = 1\n")
    assert "serve.toml is a file, wanted is a bundle: " in told(capsys, "serve", "serve.toml")
    (tmp_path / "hf").mkdir()
    for checkpoint in ("hf/config.json", "model.gguf"):
        (tmp_path / checkpoint).write_text("{}")
    for given in ("hf", "model.gguf"):
        assert f"write a recipe with checkpoint = '{given}'" in told(capsys, "serve", given)
    assert "no bundle to serve: give its folder, such as engines/store/NAME (" in told(capsys, "serve")


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out, error = capsys.readouterr()
    assert ("  build     make a bundle" in out, error) == (True, "")
    assert main([]) == 2


class _FoundError(Exception):
    """Instead of what the command would do with its arguments."""


@pytest.mark.parametrize("name", [point.name for point in entry_points(group=GROUP)])
def test_every_option_says_what_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsers = []

    def catch(parser: ArgumentParser, args: list[str]) -> None:
        parsers.append(parser)
        raise _FoundError

    monkeypatch.setattr(ArgumentParser, "parse_args", catch)
    with pytest.raises(_FoundError):
        main([name])
    (parser,) = parsers
    assert parser.description
    assert [action.dest for action in parser._actions if not action.help] == []
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, parser.format_help().splitlines())) < 80


@pytest.mark.parametrize("command", ["inspect", "plan"])  # by print, and by rich
def test_a_reader_that_has_seen_enough_is_no_failure(tmp_path: Path, command: str) -> None:
    given = made.make(tmp_path / "b").path if command == "inspect" else RECIPES / "smollm2-135m-rtx.toml"
    code = f"import sys; from ostinato.engines.command import main; sys.exit(main([{command!r}, {str(given)!r}]))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
