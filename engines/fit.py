"""Whether a bundle can run on a machine: found, wanted, and what to run where it can't (once at start).

    our kernel's binary   runs on the architecture it was assembled for (engines/architectures.py); that of 8.Y also on
                          8.Z with Z >= Y, unless one of the two is a Jetson
    TensorRT-RTX engine   runs on the compute capabilities it was built for, under the very release that built it
    TensorRT engine       runs on the compute capability it was built on, or on every one since 8.0 (`ampere_plus`);
                          under the release that built it, or a later one of its major (`version_compatible`)
    x86 kernels           run on Linux, where the processor has the instructions that the manifest names

(CUDA Programming Guide, "Binary Compatibility"; TensorRT 11 and TensorRT for RTX 1.7, "Engine Compatibility".)
A bundle needs all of its parts to run, so the strictest decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from .architectures import KERNEL_ARCHITECTURES
from .decoder_record import DECODER_FILES
from .errors import BundleError
from .manifest import Manifest
from .processor import why_unfit
from .program import FILE_NAME as PROGRAM
from .targets import GPU_TARGETS, TARGETS

MINIMUM_DRIVER = "580"  # of CUDA 13, which engines and kernels are built with
_JETSON = ("8.7",)
_PORTABLE_MAJOR = 8  # later binaries may use instructions of one architecture alone, such as those of sm_90a
_EXTRAS = {"rtx": "ostinato[rtx]", "trt": "ostinato[trt]"}


@dataclass(frozen=True)
class Machine:
    """What a bundle would run on; None where there is no such thing.

    `architecture`: such as "x86_64". `compute_capability`: such as "8.9". `driver_version`: such as "580.65.06".
    `tensorrt_version`: of the library for the bundle's target, such as "1.7.1.116". `plugin_digest`: of the operators'
    sources installed. `system`: such as "Linux". `cpu_flags`: the processor's, as Linux spells them.
    """

    architecture: str
    plugin_digest: str
    compute_capability: str | None = None
    gpu_name: str | None = None
    driver_version: str | None = None
    tensorrt_version: str | None = None
    system: str = ""
    cpu_flags: frozenset[str] = frozenset()


def check_fit(manifest: Manifest, machine: Machine) -> None:
    """Raises BundleError for the first thing that does not fit, in the order in which a user would mend them."""
    check_architecture(manifest, machine.architecture)
    if TARGETS[manifest.target].has_decoder:
        _check_processor(manifest, machine)
    if manifest.target not in GPU_TARGETS:
        return
    _check_parts(manifest)
    _check_driver(manifest, machine)
    _check_compute_capability(manifest, machine)
    _check_tensorrt(manifest, machine)
    if machine.plugin_digest != manifest.plugin_digest:
        raise BundleError(
            f"the operators' sources here have digest {machine.plugin_digest[:16] or 'none'}, the bundle was built "
            f"with {manifest.plugin_digest[:16] or 'none'}: build it again with this ostinato, or install the one that "
            f"built it ({manifest.toolchain.get('ostinato', 'unknown')})"
        )


def check_architecture(manifest: Manifest, architecture: str) -> None:
    """Raises BundleError where the bundle is for another kind of processor. An empty entry means any."""
    wanted = manifest.hardware.get("machine")
    if wanted and wanted != architecture:
        raise BundleError(f"the bundle was built for {wanted}, this machine is {architecture}: build it here")


def _check_processor(manifest: Manifest, machine: Machine) -> None:
    why = why_unfit(manifest.hardware, machine.architecture, machine.system, machine.cpu_flags)
    if why is not None:
        raise BundleError(
            f"the bundle is for target {manifest.target}, this machine {why}: build with a recipe of target cpu, "
            "which runs on any x86-64, or run it on a processor with AVX-512 VNNI"
        )
    if missing := sorted({f"rank0/{name}" for name in DECODER_FILES} - set(manifest.files)):
        raise BundleError(f"the bundle has no {', '.join(missing)}: build it again")


def kernels_run(built_for: str, found: str) -> bool:
    """Whether kernels compiled for one compute capability run on a GPU of another."""
    if built_for == found or KERNEL_ARCHITECTURES.get(built_for, "none") == KERNEL_ARCHITECTURES.get(found):
        return True
    built, here = _numbers(built_for), _numbers(found)
    return built[0] == here[0] == _PORTABLE_MAJOR and here >= built and not {built_for, found} & set(_JETSON)


def _check_parts(manifest: Manifest) -> None:
    """A program and an engine of every rank."""
    wanted = manifest.shards.num_ranks
    if len(manifest.engines) != wanted or not all(manifest.engines):
        raise BundleError(
            f"the bundle tells of engines of {sum(map(bool, manifest.engines))} ranks, it needs those of {wanted}: "
            "build it again"
        )
    for rank, engines in enumerate(manifest.engines):
        for file in (PROGRAM, *(engine.file for engine in engines)):
            if f"rank{rank}/{file}" not in manifest.files:
                raise BundleError(f"the bundle has no rank{rank}/{file}: build it again")


def _check_driver(manifest: Manifest, machine: Machine) -> None:
    found = machine.driver_version
    if found is None or machine.compute_capability is None:
        missing = "NVIDIA driver" if found is None else "NVIDIA GPU"
        raise BundleError(
            f"the bundle is for target {manifest.target}, this machine has no {missing}: run it on a GPU of compute "
            f"capability {' or '.join(manifest.compute_capabilities)}, or build for target cpu"
        )
    if _numbers(found) < _numbers(MINIMUM_DRIVER):
        raise BundleError(
            f"the NVIDIA driver is {found}, CUDA 13 needs {MINIMUM_DRIVER} or later: install a newer driver"
        )


def _check_compute_capability(manifest: Manifest, machine: Machine) -> None:
    found, wanted = machine.compute_capability, manifest.compute_capabilities
    assert found is not None, "checked with the driver"
    if found in wanted:
        return
    has_kernels = any(kernels_run(built_for, found) for built_for in wanted)
    if has_kernels and manifest.target == "trt" and manifest.tensorrt.hardware_compatibility == "ampere_plus":
        return
    why = " (the kernels would run, the engines would not)" if has_kernels else ""
    raise BundleError(
        f"{machine.gpu_name or 'the GPU'} has compute capability {found}, the bundle was built for "
        f"{', '.join(wanted)}{why}: build it again with --set 'compute_capabilities=[\"{found}\"]'"
    )


def _check_tensorrt(manifest: Manifest, machine: Machine) -> None:
    library = "TensorRT-RTX" if manifest.target == "rtx" else "TensorRT"
    built_with = sorted({engine.version for engines in manifest.engines for engine in engines})
    found = machine.tensorrt_version
    if found is None:
        raise BundleError(
            f"{library} is not installed, the bundle needs {', '.join(built_with)}: install {_EXTRAS[manifest.target]}"
        )
    is_later_enough = manifest.target == "trt" and manifest.tensorrt.version_compatible
    for version in built_with:
        built, here = _numbers(version)[:3], _numbers(found)[:3]
        if here == built or (is_later_enough and here[0] == built[0] and here > built):
            continue
        wanted = f"{version} or a later {built[0]}.x" if is_later_enough else version
        raise BundleError(
            f"{library} here is {found}, the engines need {wanted}: install that version, or build the bundle again"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """ "8.9" → (8, 9). Raises BundleError for what is no version."""
    try:
        return tuple(int(part) for part in version.split("."))
    except ValueError:
        raise BundleError(f"{version!r} is no version in numbers: build the bundle again") from None
