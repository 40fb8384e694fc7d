"""Size is a signal: a file or a function past its bound means that two nouns share it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path for room in ("engines", "plugins", "builder", "runtime", "benchmarks") for path in (ROOT / room).glob("*.py")
)
KERNELS = sorted((ROOT / "plugins" / "x86").glob("*.[ch]"))
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 40
MAX_PARAMETERS = 8  # self and keyword-only ones included; a kernel is given each pointer and each constant


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, node.name
            is_kernel = any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)
            assert is_kernel or len(node.args.args) + len(node.args.kwonlyargs) <= MAX_PARAMETERS, node.name


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_in_c_stay_small(path: Path) -> None:
    assert path.read_text().count("\n") <= MAX_FILE_LINES
