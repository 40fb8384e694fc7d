"""Which worker runs which tests, and that a test leaves the log of its process as it was.

The tests of a file run together, so that what its fixtures make is made once. xdist 3.8 hands the groups of its
`--dist loadgroup` over in a private field, which pytest 9.2 does not read: each test would go to whichever worker is
free, and all would build every bundle and open every server.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
_GROUP = re.compile(r'xdist_group\("([^"]+)"\)')


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In place of xdist's scheduler of that name."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler.loadscope import LoadScopeScheduling  # type: ignore[import-untyped]  # not without xdist

    class FileScheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid.partition("::")[0])

    return FileScheduling(config, log)


@cache
def unit_of(file: str) -> str:
    """What a worker takes as a whole: the file, or all of those whose `xdist_group` mark has the same name."""
    mark = _GROUP.search((ROOT / file).read_text())
    return mark[1] if mark else file


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A command sets its process's log up: later tests would write theirs to what this one's standard error was."""
    root, ports = logging.getLogger(), logging.getLogger("uvicorn.error")
    handlers, levels = set(root.handlers), (root.level, ports.level)
    yield
    for handler in set(root.handlers) - handlers:
        root.removeHandler(handler)
    root.setLevel(levels[0])
    ports.setLevel(levels[1])
