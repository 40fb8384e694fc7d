"""What a segment's engine is built from: its tensors, its profiles, what the recipe asks of TensorRT (offline)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ostinato.engines.engine_record import EngineProfile, EngineTensor
from ostinato.engines.recipe import Recipe
from ostinato.engines.sizes import Limits

from .cut import Segment
from .engine_job import EngineJob
from .program_buffers import engine_tensors
from .program_writer import engine_file

ProfileRule = Callable[[Iterable[EngineTensor], Limits], tuple[EngineProfile, ...]]


def segment_job(segment: Segment, model: Path, folder: Path, recipe: Recipe, rule: ProfileRule) -> EngineJob:
    """`model`: the segment as ONNX. `folder`: of the rank. `rule`: profiles from the engine's inputs."""
    inputs = engine_tensors(segment, segment.inputs)
    return EngineJob(
        name=segment.name,
        model=model,
        engine=folder / engine_file(segment),
        inputs=inputs,
        outputs=engine_tensors(segment, segment.outputs),
        profiles=rule(inputs, recipe.limits),
        options=recipe.tensorrt,
        compute_capabilities=recipe.compute_capabilities,
    )
