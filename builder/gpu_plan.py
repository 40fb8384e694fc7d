"""What becomes of a recipe on one GPU: whether it fits, what to change if not, what a step takes at best (offline)."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.engines.memory_table import Latency
from ostinato.engines.recipe import Recipe
from ostinato.engines.targets import GPU_TARGETS, TARGETS

from .config import DecoderConfig
from .gpus import Gpu
from .launch_plan import step_shapes
from .memory_plan import Fit, fit, memory_table
from .roofline import StepPrediction, predict_step

_MIB, _GIB = 2**20, 2**30
_USUAL_CONTEXT = 1024


@dataclass(frozen=True)
class GpuPlan:
    """`predictions`: of every step shape, `context` tokens cached in each decode row. `faults`: empty if it fits."""

    gpu: Gpu
    fit: Fit
    context: int
    predictions: tuple[StepPrediction, ...]
    faults: tuple[str, ...]

    def latency(self) -> dict[str, Latency]:
        """For a manifest: nothing of it is measured."""
        basis = f"roofline of {self.gpu.name}, decode rows at {self.context} tokens of context"
        return {prediction.key: Latency(prediction.total_ms, None, basis) for prediction in self.predictions}


def usual_context(recipe: Recipe) -> int:
    """Tokens that a decode row is taken to have cached where nobody says."""
    return min(_USUAL_CONTEXT, recipe.limits.max_context - 1)


def plan_for(config: DecoderConfig, recipe: Recipe, gpu: Gpu, context: int) -> GpuPlan:
    """Pure arithmetic. Raises BuildError where the model can't be cut as the recipe says."""
    found = fit(memory_table(config, recipe), recipe.limits, gpu)
    steps = step_shapes(recipe.limits)
    return GpuPlan(
        gpu=gpu,
        fit=found,
        context=context,
        predictions=tuple(predict_step(config, recipe, gpu, step, context) for step in steps),
        faults=tuple(_faults(config, recipe, gpu, found)),
    )


def _faults(config: DecoderConfig, recipe: Recipe, gpu: Gpu, found: Fit) -> list[str]:
    """Why this build would not run on this GPU, and what to change."""
    faults = []
    capability, limits = gpu.compute_capability, recipe.limits
    if capability not in TARGETS[recipe.target].compute_capabilities:
        others = [target for target in GPU_TARGETS if capability in TARGETS[target].compute_capabilities]
        faults.append(
            f"{gpu.name} has compute capability {capability}, which target {recipe.target} has no engines for: "
            f"choose target {' or '.join(others)}"
        )
    elif capability not in recipe.compute_capabilities:
        faults.append(
            f"{gpu.name} has compute capability {capability}, the recipe builds for "
            f"{', '.join(recipe.compute_capabilities)}: add {capability} to compute_capabilities"
        )
    if limits.max_context > config.sizes.max_positions:
        faults.append(
            f"limits.max_context is {limits.max_context}, the model has {config.sizes.max_positions} positions: "
            "lower it"
        )
    if not found.fits:
        faults.append(f"{size_text(found.missing_bytes)} too much for {gpu.name}: {_advice(found)}")
    return faults


def _advice(found: Fit) -> str:
    limits = found.limits
    if found.tokens < limits.block_size:
        return "nothing remains for KV blocks: raise shards.tensor_parallel, or choose a GPU with more memory"
    if found.tokens < limits.max_context:
        return f"lower limits.kv_tokens and limits.max_context to {found.tokens}, or raise shards.tensor_parallel"
    return f"lower limits.kv_tokens to {found.tokens}, choose a smaller kv_cache, or raise shards.tensor_parallel"


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"
