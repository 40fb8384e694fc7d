"""Everything that serves one bundle, put together from tokenizer to loop (once at start).

The executor follows from the bundle's target; its library is imported here, when it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ostinato.engines.bundle import Bundle, open_bundle
from ostinato.engines.errors import BundleError
from ostinato.engines.fit import check_fit
from ostinato.engines.manifest import Manifest
from ostinato.engines.sizes import Limits
from ostinato.engines.targets import GPU_TARGETS, TARGETS

from .batch import Packer
from .config import RuntimeConfig
from .executor import Executor, LogitsObserver
from .graphs import Coverage
from .intake import Intake
from .libraries import REAL, Libraries
from .loop import Loop
from .machine import find_machine, find_processor
from .pages import Pages
from .progress import Show
from .resident import release_file_pages
from .scheduler import Scheduler
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Shop:
    """An opened bundle, ready to serve. The loop is not started: its driver decides how.

    `coverage`: what the executor replayed, if it replays.
    """

    bundle: Bundle
    limits: Limits
    tokenizer: Tokenizer
    intake: Intake
    loop: Loop
    coverage: Coverage | None


def check_shop(path: Path, config: RuntimeConfig, libraries: Libraries = REAL) -> None:
    """Refuse at once what `open_shop` would refuse after it has read every file, or after it has begun to load."""
    _check(open_bundle(path, verify_digests=False), config, libraries)


def open_shop(
    path: Path,
    config: RuntimeConfig,
    progress: Show,
    observe_logits: LogitsObserver | None = None,
    libraries: Libraries = REAL,
) -> Shop:
    """Open a bundle, ready its executor. Raises BundleError where bundle and machine do not fit."""
    progress("check the bundle", 0, 1)
    bundle = open_bundle(path)
    limits = _check(bundle, config, libraries)
    progress("check the bundle", 1, 1)
    tokenizer = Tokenizer(bundle.tokenizer_dir)
    if TARGETS[bundle.manifest.target].has_decoder:
        executor = _x86_executor(bundle, limits, config, progress, observe_logits)
    elif bundle.manifest.target not in GPU_TARGETS:
        executor = _cpu_executor(bundle, limits, config, progress, observe_logits)
    elif observe_logits is not None:
        raise BundleError(
            f"{path} is for target {bundle.manifest.target}, whose logits stay on the GPU: observe those of a bundle "
            "for target cpu"
        )
    else:
        executor = _gpu_executor(bundle, limits, config, progress, libraries)
    pages = Pages(limits, config.prefix_cache)
    packer = Packer(limits, bundle.manifest.sizes.vocab_size, executor.rules)
    loop = Loop(Scheduler(limits, pages, executor.rules), packer, executor)
    jumps = _is_same_in_chunks(bundle.manifest) if config.jump_ahead is None else config.jump_ahead
    jump_ahead = jumps and executor.rules.num_in_flight == 1
    intake = Intake.for_bundle(bundle.manifest, limits, jump_ahead=jump_ahead)
    return Shop(bundle, limits, tokenizer, intake, loop, executor.coverage)


def _check(bundle: Bundle, config: RuntimeConfig, libraries: Libraries) -> Limits:
    limits = config.limits(bundle.manifest)
    if bundle.manifest.target in GPU_TARGETS:
        check_fit(bundle.manifest, find_machine(bundle.manifest.target, libraries))
    else:
        check_fit(bundle.manifest, find_processor())
    return limits


def _is_same_in_chunks(manifest: Manifest) -> bool:
    """Whether a token computed in a chunk has the same logits, and leaves the same in the cache, as one alone."""
    return TARGETS[manifest.target].rows_are_alike or manifest.kv_cache == "float32"


def _x86_executor(
    bundle: Bundle, limits: Limits, config: RuntimeConfig, progress: Show, observe: LogitsObserver | None
) -> Executor:
    from .x86_executor import X86Executor

    return X86Executor(bundle, limits, num_threads=config.threads, observe_logits=observe, progress=progress)


def _cpu_executor(
    bundle: Bundle, limits: Limits, config: RuntimeConfig, progress: Show, observe: LogitsObserver | None
) -> Executor:
    from .openvino import OpenVINOExecutor

    executor = OpenVINOExecutor(bundle, limits, num_threads=config.threads, observe_logits=observe, progress=progress)
    executor.warm(progress)
    for file in bundle.rank_dir().iterdir():  # the engine repacked the weights: their file need not stay resident
        release_file_pages(file)
    return executor


def _gpu_executor(
    bundle: Bundle, limits: Limits, config: RuntimeConfig, progress: Show, libraries: Libraries
) -> Executor:
    """This process is the one rank, or the first of several, whose processes find their libraries themselves."""
    if bundle.manifest.shards.num_ranks == 1:
        from .cuda_executor import CudaExecutor

        return CudaExecutor(bundle, limits, libraries=libraries, is_strict=config.strict_graphs, progress=progress)
    from .ranks import RanksExecutor

    return RanksExecutor(bundle, limits, is_strict=config.strict_graphs, progress=progress)
