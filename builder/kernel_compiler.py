"""Compiles Triton kernels to cubins, one file a kernel and architecture, on a machine without a GPU (offline).

    KernelSpec ─ triton.compile ─▶ PTX ─ ptxas ─▶ folder/sm_XX/{name}.cubin, KernelInfo

Two processes at most. Triton keeps what it compiles in a cache of its own on disk; here that is a folder beside the
cubins which lives as long as one call, so nothing that an earlier version or another setting left behind can come back.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ostinato.engines.architectures import KERNEL_ARCHITECTURES
from ostinato.engines.errors import BuildError
from ostinato.engines.program import KernelInfo
from ostinato.plugins.kernel_launch import KernelSpec

from .termination import interrupts_held

if TYPE_CHECKING:
    from .pipeline import Progress

PLUGINS = "ostinato.plugins"
_MAX_PROCESSES = 2
_WARP = 32
_REGISTERS, _MAX_REGISTERS = 65536, 255  # of a processor, of a thread
_TYPES = {
    "float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "int64": "*i64", "int32": "*i32", "int8": "*i8",
    "uint8": "*u8",
}  # fmt: skip
_ALIGNED = [["tt.divisibility", 16]]  # every buffer starts at a multiple of 16 bytes
# Shared memory that one block may ask for, in bytes (CUDA C++ Programming Guide, compute capabilities).
_MAX_SHARED_BYTES = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_87": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10,
    "sm_100": 227 << 10, "sm_120": 99 << 10,
}  # fmt: skip
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")
Kernels = dict[str, dict[str, KernelInfo]]
Compile = Callable[[Iterable[KernelSpec], Sequence[str], Path, "Progress"], Kernels]  # as `compile_kernels`


@dataclass(frozen=True)
class _Job:
    spec: KernelSpec
    arch: str
    file: Path
    package: str
    spills_allowed: bool


def compile_kernels(
    specs: Iterable[KernelSpec],
    capabilities: Sequence[str],
    folder: Path,
    progress: Progress,
    *,
    package: str = PLUGINS,
    spills_allowed: bool = False,
) -> Kernels:
    """Write folder/sm_XX/{name}.cubin for every kernel and compute capability; returns "sm_XX" → name → KernelInfo.

    The same spec gives the same bytes. `progress` counts cubins. `package`: where a spec's module is found. Raises
    BuildError, naming kernel and architecture, if one does not compile, spills registers to memory (unless
    `spills_allowed`, to report them all), wants more shared memory than there is, or device memory of its own.
    """
    archs = list(dict.fromkeys(KERNEL_ARCHITECTURES[capability] for capability in capabilities))
    named = {spec.name: spec for spec in specs}
    jobs = [
        _Job(spec, arch, folder / arch / f"{name}.cubin", package, spills_allowed)
        for arch in archs
        for name, spec in named.items()
    ]
    progress.stage("kernels", len(jobs))
    for arch in archs:
        (folder / arch).mkdir(parents=True, exist_ok=True)
    kernels: Kernels = {arch: {} for arch in archs}
    for job, info in _compile_all(jobs, folder, progress):
        kernels[job.arch][job.spec.name] = info
    return kernels


def _compile_all(jobs: Sequence[_Job], folder: Path, progress: Progress) -> Iterator[tuple[_Job, KernelInfo]]:
    if not jobs:
        return
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix=".cache-", dir=folder.absolute()) as cache,
        ProcessPoolExecutor(min(_MAX_PROCESSES, len(jobs)), context, _settle, (cache,)) as pool,
    ):
        with interrupts_held():
            futures = [pool.submit(_compile, job) for job in jobs]
        try:
            for job, future in zip(jobs, futures, strict=True):
                progress.detail(f"{job.arch}: {job.spec.function}")
                yield job, future.result()
                progress.advance(1)
        except BrokenProcessPool:
            raise BuildError(
                f"a process died while {job.spec.function} or a kernel after it was compiled for {job.arch}: "
                "see that some 2 GB of memory are free, and build again"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)  # what still runs would write into the cache while it is removed


def _settle(cache: str) -> None:
    """Once a process: settings of Triton that would make a cubin depend on more than its spec; all files in `cache`."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tempfile.tempdir = knobs.cache.dir = cache
    knobs.compilation.always_compile = True
    knobs.compilation.disable_line_info = True  # else the checkout's path is in every cubin
    knobs.runtime.override_arch = None


def _end_with_parent() -> None:
    """A process of the pool holds both ends of its queue, so it would wait for ever for a build that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a process of the pool"
    parent.join()
    os._exit(1)


def _compile(job: _Job) -> KernelInfo:
    """In a process of the pool: one kernel for one architecture."""
    if knobs.runtime.interpret:
        raise BuildError("TRITON_INTERPRET is set, so that kernels are interpreted: unset it to compile them")
    info = _written(job, None)
    if info.spill_bytes:  # the assembler also spills to fit more blocks on a processor: not if it is told a bound
        info = _written(job, min(_MAX_REGISTERS, _REGISTERS // (_WARP * info.num_warps)))
    if info.spill_bytes and not job.spills_allowed:
        raise BuildError(
            f"kernel {job.spec.function} spills {info.spill_bytes} bytes a thread on {job.arch} "
            f"({info.registers} registers, {_choices(job.spec)}): use smaller tiles or more warps"
        )
    if info.shared_bytes > _MAX_SHARED_BYTES[job.arch]:
        raise BuildError(
            f"kernel {job.spec.function} wants {info.shared_bytes} bytes of shared memory, {job.arch} has "
            f"{_MAX_SHARED_BYTES[job.arch]} ({_choices(job.spec)}): use smaller tiles or fewer stages"
        )
    return info


def _written(job: _Job, max_registers: int | None) -> KernelInfo:
    """Compile, and write the cubin. `max_registers` a thread: None leaves the number to the assembler."""
    source = _source(job.spec, job.package)
    try:
        compiled = _compiled(source, job, max_registers)
        cubin = _portable(compiled.asm["ptx"]) if job.arch == "sm_120" else compiled.asm["cubin"]
    except subprocess.CalledProcessError as error:
        raise BuildError(_refusal(job, error.stderr.decode(errors="replace"))) from None
    except Exception as error:  # Triton raises what its passes raise: there is no base class
        raise BuildError(_refusal(job, str(error) or repr(error))) from None
    job.file.write_bytes(cubin)
    return _info(job, compiled)


def _source(spec: KernelSpec, package: str) -> ASTSource:
    """What Triton compiles; the kernel's parameters are the spec's pointers, in order, then its constants."""
    function = getattr(importlib.import_module(f"{package}.{spec.module}"), spec.function)
    names, constants, count = function.arg_names, dict(spec.constants), len(spec.pointers)
    assert set(names[count:]) == set(constants), f"{spec.function} takes {names[count:]}, the spec gives {constants}"
    types = [_TYPES[pointer.dtype] for pointer in spec.pointers] + ["constexpr"] * len(constants)
    aligned = {(index,): _ALIGNED for index in range(count)}
    return ASTSource(function, dict(zip(names, types, strict=True)), constants, aligned)


def _compiled(source: ASTSource, job: _Job, max_registers: int | None) -> Any:
    options: dict[str, Any] = {
        "num_warps": job.spec.num_warps,
        "num_stages": job.spec.num_stages,
        "enable_fp_fusion": False,  # a fused multiply-add rounds once where the oracle rounds twice
        "maxnreg": max_registers,
        "ptx_options": "",
    }
    return triton.compile(source, GPUTarget("cuda", int(job.arch.removeprefix("sm_")), _WARP), options)


def _portable(ptx: str) -> bytes:
    """A cubin for every 12.x: Triton assembles for 12.0 and nothing else (`sm_120a`), and is refused by 12.1."""
    with tempfile.TemporaryDirectory() as scratch:
        source, cubin = Path(scratch, "kernel.ptx"), Path(scratch, "kernel.cubin")
        source.write_text(ptx.replace(".target sm_120a", ".target sm_120"))
        # --regAllocOptLevel as Triton gives it, against a fault of this assembler
        options = ["--fmad=false", "--regAllocOptLevel=2", "--gpu-name=sm_120"]
        command = [knobs.nvidia.ptxas_blackwell.path, *options, str(source), "-o", str(cubin)]
        subprocess.run(command, check=True, capture_output=True)
        return cubin.read_bytes()


def _info(job: _Job, compiled: Any) -> KernelInfo:
    metadata = compiled.metadata
    scratch = metadata.global_scratch_size + metadata.profile_scratch_size
    if scratch:
        raise BuildError(
            f"kernel {job.spec.function} wants {scratch} bytes of device memory of its own on {job.arch} "
            f"({_choices(job.spec)}): a captured launch has none to give; write it without"
        )
    usage = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(job.file)],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    found = _USAGE.search(usage)
    assert found is not None, f"cuobjdump says {usage!r}"
    registers, stack, local = map(int, found.groups())
    head = compiled.asm["ptx"].partition(".visible .entry")[2].partition(")")[0]
    return KernelInfo(
        entry=metadata.name,
        num_warps=metadata.num_warps,
        shared_bytes=metadata.shared,
        num_hidden_pointers=head.count(".param") - len(job.spec.pointers),
        registers=registers,
        spill_bytes=stack + local,
    )


def _refusal(job: _Job, reason: str) -> str:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return (
        f"kernel {job.spec.function} does not compile for {job.arch} ({_choices(job.spec)}): "
        f"{lines[-1] if lines else 'no reason given'}"
    )


def _choices(spec: KernelSpec) -> str:
    constants = ", ".join(f"{name}={value}" for name, value in spec.constants)
    return f"{constants}; {spec.num_warps} warps, {spec.num_stages} stages"
