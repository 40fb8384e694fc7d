"""A build's progress reads as well in a file as in a terminal."""

from __future__ import annotations

import io
import re

from rich.console import Console

from ostinato.builder.progress import ConsoleProgress


def test_a_file_gets_a_line_a_stage_and_nothing_else() -> None:
    file = io.StringIO()
    with ConsoleProgress(Console(file=file)).shown() as progress:
        progress.stage("checkpoint")
        progress.detail("half of it")
        progress.stage("weights", total_bytes=8)
        progress.advance(8)
    assert re.fullmatch(r"  checkpoint  \d+\.\d s\n     weights  \d+\.\d s\n", file.getvalue())
