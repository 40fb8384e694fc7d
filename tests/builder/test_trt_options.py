"""What a recipe asks of TensorRT, against the configuration that a builder without a GPU was given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.builder.checkpoint import Checkpoint

from ..tensorrt_fakes import KILOBYTE
from .trt_ranks import FLAG, Listener, config, network, recipe_of, trt, written

pytestmark = pytest.mark.xdist_group("trt")  # one worker traces, not two


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"refit": True}, {"REFIT"}),
        ({"engine_weights": "stripped"}, {"STRIP_PLAN", "REFIT_IDENTICAL"}),
        ({"engine_weights": "stripped", "refit": True}, {"STRIP_PLAN", "REFIT"}),
        ({"weight_streaming": True}, {"WEIGHT_STREAMING"}),
        ({"version_compatible": True}, {"VERSION_COMPATIBLE"}),
    ],
)
def test_options_become_builder_flags(
    checkpoint: Checkpoint, tmp_path: Path, options: dict[str, Any], flags: set[str]
) -> None:
    _, folder = written(recipe_of(**options), checkpoint, tmp_path)
    assert config().flags == {FLAG.EDITABLE_TIMING_CACHE, *(getattr(FLAG, name) for name in flags)}
    keeps = {"refit": True, "engine_weights": "stripped"}.items() & options.items()
    assert (folder / "refit" / "decoder.bin").is_file() == bool(keeps)


def test_levels_are_set_as_asked(checkpoint: Checkpoint, tmp_path: Path) -> None:
    written(recipe_of(optimization_level=5, hardware_compatibility="ampere_plus"), checkpoint, tmp_path)
    assert config().builder_optimization_level == 5
    assert config().hardware_compatibility_level == trt.HardwareCompatibilityLevel.AMPERE_PLUS
    plain = tmp_path / "plain"
    plain.mkdir()
    written(recipe_of(), checkpoint, plain)
    assert config().builder_optimization_level is None
    assert config().hardware_compatibility_level == trt.HardwareCompatibilityLevel.NONE


def test_the_inspectors_dump_and_memory_of_every_profile_are_kept(checkpoint: Checkpoint, tmp_path: Path) -> None:
    result, folder = written(recipe_of(), checkpoint, tmp_path)
    dump = json.loads((folder / "engines" / "decoder.layers.json").read_text())
    names = [layer.name for layer in network().layers]
    assert [layer["Name"] for layer in dump["inspector"]["Layers"]] == names
    memory = {"decode 1": 1, "decode 2": 2, "decode 4": 3, "prefill": 4}
    assert dump["device_memory_bytes"] == {name: count * KILOBYTE for name, count in memory.items()}
    assert result.engines[0].device_memory_bytes == 4 * KILOBYTE
    assert result.engines[0].layers == tuple(f"kind {name}" for name in names)


def test_progress_tells_of_the_outermost_phase(checkpoint: Checkpoint, tmp_path: Path) -> None:
    listener = Listener()
    written(recipe_of(), checkpoint, tmp_path, progress=listener)
    assert listener.heard == [f"decoder: Building Engine, {done} of 3" for done in range(3)]
