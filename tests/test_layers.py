"""Who may import what: the rooms' walls, the passports of heavy libraries, and the files that must stay device-free."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {"engines": set(), "plugins": {"engines"}, "builder": {"engines", "plugins"}, "runtime": {"engines", "plugins"}}
PASSPORTS = {  # library → where its import may stand
    "torch": {"builder"},
    "onnx": {
        "builder",
        "plugins/paged_attention_onnx.py",
        "plugins/fused_sampling_onnx.py",
        "plugins/stateful_sampling_onnx.py",
        "plugins/collectives_onnx.py",
    },
    "triton": {
        "builder/kernel_compiler.py",
        "plugins/attention_tile.py",
        "plugins/cache_codes.py",
        "plugins/cache_write.py",
        "plugins/decode_attention.py",
        "plugins/feed_tokens_kernel.py",
        "plugins/prefill_attention.py",
        "plugins/sampling_adjust.py",
        "plugins/sampling_draw.py",
        "plugins/sampling_logprobs.py",
        "plugins/sampling_rank.py",
        "plugins/sampling_weigh.py",
    },
    "tensorrt": {
        "builder/trt_builder.py",
        "builder/trt_config.py",
        "builder/trt_journal.py",
        "builder/trt_network.py",
        "plugins/paged_attention_plugin.py",
        "plugins/stateful_sampling_plugin.py",
        "plugins/tensorrt_plugin.py",
    },
    "tensorrt_rtx": {"builder/rtx_builder.py"},
    "cuda": {"plugins/cubin.py"},
    "nccl": {"runtime/nccl.py"},
    "transformers": {"builder"},
    "gguf": {"builder"},
    "safetensors": {"builder"},
    "openvino": {"runtime/openvino.py", "runtime/openvino_graph.py"},
    "opentelemetry": {"runtime/otel.py"},
    "starlette": {"runtime"},
    "llguidance": {"runtime/grammars.py", "runtime/grammar_guide.py", "runtime/grammar_worker.py"},
    "pydantic": {"runtime"},
}
DESK = ("request", "pages", "scheduler", "batch", "sampling")
MACHINE = (  # given their driver
    *("cuda", "capture", "step_layout", "buffers", "state_lines", "device_weights", "graphs", "trt", "machine"),
    *("step_inputs", "rank_program", "gpu_rank", "cuda_executor"),
    *("batch_bytes", "shared_ring", "nccl", "rank", "rank_process", "rank_watch", "ranks"),
)
DEVICE_LIBRARIES = ("openvino", "torch", "onnx", "tensorrt", "cuda", "starlette")


@cache
def _imports(path: Path) -> list[tuple[int, str]]:
    """(relative level, dotted name) of every import in a file, those inside functions too."""
    found = list[tuple[int, str]]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or ""))
    return found


def _sources(room: str) -> list[Path]:
    return sorted((ROOT / room).glob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_stands_below_them(room: str) -> None:
    assert _sources(room)
    for path in _sources(room):
        for level, name in _imports(path):
            assert level <= 1, f"{path.name} climbs out of its room"
            if level:
                continue
            first, *rest = name.split(".")
            assert first not in ROOMS, f"{path.name} imports the bare {name}, a second copy of the room"
            if first == "ostinato":
                assert rest, f"{path.name} imports the lobby"
                assert rest[0] in ROOMS[room], f"{path.name} imports {name} across a wall"


@pytest.mark.parametrize("library", PASSPORTS)
def test_heavy_libraries_stay_where_they_belong(library: str) -> None:
    for room in ROOMS:
        for path in _sources(room):
            used = any(not level and name.split(".")[0] == library for level, name in _imports(path))
            allowed = {room, f"{room}/{path.name}"} & PASSPORTS[library]
            assert not used or allowed, f"{room}/{path.name} imports {library}"


_LOAD = f"""
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(f"ostinato.runtime.{{name}}")
    if found := [library for library in {DEVICE_LIBRARIES!r} if library in sys.modules]:
        sys.exit(f"{{name}} loads {{', '.join(found)}}")
"""


def test_files_of_the_desk_and_of_the_simulated_machine_load_no_device_library() -> None:
    """One process for all: whichever is the first to load one is named."""
    done = subprocess.run([sys.executable, "-c", _LOAD, *DESK, *MACHINE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    guilty = subprocess.run(
        [sys.executable, "-c", _LOAD, "pages", "server"], capture_output=True, text=True, check=False
    )
    assert (guilty.returncode, guilty.stderr) == (1, "server loads starlette\n")
