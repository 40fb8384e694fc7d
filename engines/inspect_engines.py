"""The part of `ostinato inspect` that tells of engines, profiles, tensors and kernels, rank by rank (once per call)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from .bundle import Bundle
from .engine_record import EngineInfo, EngineTensor
from .program import Program

_UNITS = ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)
Row = tuple[str, str]


def engine_rows(bundle: Bundle, full: bool) -> Iterator[Row]:
    """Lines of `key, value`: one a rank, or all; engines that follow each other and differ by name alone share theirs.

    Raises BundleError if a rank's program does not read.
    """
    for rank, engines in enumerate(bundle.manifest.engines):
        where, program = f"rank {rank}", bundle.program(rank)
        size = sum(engine.size_bytes for engine in engines)
        counts = f"{len(engines)} engines, {size_text(size)}, built by TensorRT {_versions(engines)}"
        if full:
            yield where, counts
            for _, group in groupby(engines, key=_signature):
                yield from _group_rows(f"{where},", list(group))
            yield from _program_rows(f"{where},", program)
        else:
            compiled = [kernel for found in program.kernels.values() for kernel in found.items()]
            names = {name for name, _ in compiled}
            yield where, f"{counts}; {len(names)} kernels for {', '.join(program.kernels) or 'no GPU'}"
            if spilling := {name for name, kernel in compiled if kernel.spill_bytes}:
                yield f"{where}, spilling", ", ".join(sorted(spilling))


def size_text(num_bytes: int) -> str:
    """Bytes for people, such as "1.5 MiB"."""
    for unit, scale in _UNITS:
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"


def _group_rows(where: str, engines: list[EngineInfo]) -> Iterator[Row]:
    first, last = engines[0], engines[-1]
    name = first.file if first is last else f"{first.file} … {last.file}"
    size = sum(engine.size_bytes for engine in engines)
    memory = [engine.device_memory_bytes for engine in engines if engine.device_memory_bytes is not None]
    needs = f", {size_text(max(memory))} of device memory" if memory else ""
    yield f"{where} {name}", f"{len(engines)} of this form, {size_text(size)}{needs}"
    if first.operators:
        yield f"{where} operators", ", ".join(f"{count} {name}" for name, count in sorted(first.operators.items()))
    yield f"{where} inputs", _tensors(first.inputs)
    yield f"{where} outputs", _tensors(first.outputs)
    for profile in first.profiles:
        yield f"{where} profile {profile.name}", profile.told()
    if first.validity:
        yield f"{where} validity", first.validity


def _program_rows(where: str, program: Program) -> Iterator[Row]:
    calls = [type(call).__name__.removesuffix("Call").lower() for call in program.calls]
    counts = [f"{calls.count(kind)} {kind}" for kind in ("engine", "kernel", "collective") if kind in calls]
    shapes = " ".join(shape.key.replace(" ", "-") for shape in program.step_shapes)
    yield f"{where} program", f"calls: {', '.join(counts) or 'none'}; step shapes: {shapes}"
    for architecture, kernels in program.kernels.items():
        spilling = sum(kernel.spill_bytes > 0 for kernel in kernels.values())
        yield f"{where} {architecture}", f"{len(kernels)} kernels, {spilling or 'none'} with spills"
        for name, kernel in kernels.items():
            yield (
                f"{where} {architecture} {name}",
                f"{kernel.registers} registers, {kernel.shared_bytes} bytes shared, {kernel.spill_bytes} bytes "
                f"spilled, {kernel.num_warps} warps",
            )


def _signature(engine: EngineInfo) -> object:
    """Equal for engines of the same form: dtypes, shapes, profiles and operators."""
    tensors = [(tensor.dtype, tensor.shape) for tensor in (*engine.inputs, *engine.outputs)]
    profiles = [(profile.name, sorted(profile.shapes.values())) for profile in engine.profiles]
    return len(engine.inputs), tensors, profiles, sorted(engine.operators.items()), engine.validity


def _tensors(tensors: Sequence[EngineTensor]) -> str:
    return ", ".join(f"{t.name} {t.dtype}[{', '.join(map(str, t.shape))}]" for t in tensors) or "none"


def _versions(engines: Sequence[EngineInfo]) -> str:
    return ", ".join(sorted({engine.version for engine in engines})) or "nothing"
