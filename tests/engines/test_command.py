"""What a wrong call of the `ostinato` command is told: one line, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato.engines.command import main

from . import made


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
        ("build x.toml --frob", "ostinato build: unrecognized arguments: --frob (`ostinato build --help` shows all)"),
        ("serve b --port x", "ostinato serve: argument --port: invalid int value: 'x' ("),
        ("diagnose", "ostinato diagnose: URL, the server's metrics port, such as http://127.0.0.1:8001, is missing ("),
    ],
)
def test_a_wrong_call_is_told_in_one_line(capsys: pytest.CaptureFixture[str], argv: str, wanted: str) -> None:
    assert told(capsys, *argv.split()).startswith(wanted)


def test_a_folder_that_is_not_what_is_wanted_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made.make(tmp_path / "b")
    found = told(capsys, "verify", str(tmp_path / "b"))
    assert found.startswith(f"ostinato verify: {tmp_path / 'b'} is a folder, wanted is a recipe: give its TOML file, ")
    assert "--bundle FOLDER" in found
    (tmp_path / "r.toml").write_text('checkpoint = "none"\ntarget = "cpu"\n')
    (tmp_path / "empty").mkdir()
    found = told(capsys, "verify", str(tmp_path / "r.toml"), "--bundle", str(tmp_path / "empty"))
    assert "empty has no manifest.json, so it is no finished bundle: give the folder of one, such as " in found
    found = told(capsys, "verify", str(tmp_path / "r.toml"), "--bundle", str(tmp_path / "none"))
    assert "no bundle at " in found


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out, error = capsys.readouterr()
    assert ("  build     make a bundle" in out, error) == (True, "")
    assert main([]) == 2
