"""What kernels cost on each architecture, and how far their traffic is from what it must be, as tables (offline)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from ostinato.engines.program import KernelInfo
from ostinato.engines.recipe import Recipe
from ostinato.plugins.kernel_launch import KernelSpec

from .rank_operators import RankOperators
from .roofline import Traffic, attention_traffic, sampling_traffic

Kernels = Mapping[str, Mapping[str, KernelInfo]]
_NARROW = (0, 1, 0, 0)  # so that seven architectures fit a terminal of 80 columns
_MB = 10**6


def kernel_specs(operators: Iterable[RankOperators]) -> tuple[KernelSpec, ...]:
    """Every kernel of some ranks, each once."""
    launches = (
        launch
        for rank in operators
        for step in rank.steps
        for by_operator in rank.launches(step).values()
        for launch in by_operator
    )
    return tuple({launch.kernel.name: launch.kernel for launch in launches}.values())


def spills(kernels: Kernels) -> list[str]:
    """One line a kernel and architecture that spills."""
    return [
        f"{name} spills {info.spill_bytes} bytes a thread on {arch}"
        for arch, by_name in kernels.items()
        for name, info in by_name.items()
        if info.spill_bytes
    ]


def resource_view(specs: Sequence[KernelSpec], kernels: Kernels) -> Table:
    """Kernel × architecture: registers a thread, KiB of shared memory a block, and bytes spilled, if any are."""
    title = "registers a thread / KiB of shared memory, rounded up"
    table = Table("kernel", *kernels, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=_NARROW)
    for column in table.columns:
        column.no_wrap = True
    for spec, label in zip(specs, _labels(specs), strict=True):
        table.add_row(label, *(_cost(by_name[spec.name]) for by_name in kernels.values()))
    table.caption = "no kernel spills" if not spills(kernels) else "SPILL: bytes a thread that do not fit the registers"
    return table


def _labels(specs: Sequence[KernelSpec]) -> list[str]:
    """Functions by name; numbered where one is compiled with several constants, in the order of the launches."""
    functions = [spec.function for spec in specs]
    return [
        function if functions.count(function) == 1 else f"{function} {functions[: place + 1].count(function)}"
        for place, function in enumerate(functions)
    ]


def _cost(info: KernelInfo) -> str:
    spilled = f" SPILL {info.spill_bytes}" if info.spill_bytes else ""
    return f"{info.registers}/{-(-info.shared_bytes // 1024)}{spilled}"


def traffic(operators: RankOperators, recipe: Recipe, context: int) -> dict[str, dict[str, Traffic]]:
    """Operator → step shape's key → what one call moves, decode rows at `context` cached tokens."""
    found = {
        "PagedAttention": {
            step.key: attention_traffic(operators, recipe, step, context) for step in operators.steps
        }
    }  # fmt: skip
    if operators.sampling is not None:
        found["StatefulSampling"] = {step.key: sampling_traffic(operators, step) for step in operators.steps}
    return found


def traffic_view(found: Mapping[str, Mapping[str, Traffic]], context: int) -> Table:
    """What one call must move and compute, and what its launches ask of memory."""
    headers = ("operator", "step", "must MB", "moves MB", "ratio", "GFLOP", "FLOP/byte")
    table = Table(*headers, box=box.SIMPLE_HEAD, padding=_NARROW)
    for place, column in enumerate(table.columns):
        column.no_wrap, column.justify = True, "left" if place < 2 else "right"
    for operator, by_step in found.items():
        for key, one in by_step.items():
            table.add_row(
                operator,
                key,
                f"{one.needed_bytes / _MB:.3f}",
                f"{one.moved_bytes / _MB:.3f}",
                f"{one.ratio:.2f}",
                f"{one.operations / 1e9:.3f}",
                f"{one.operations / one.needed_bytes:.1f}",
            )
    table.caption = (
        f"one call, by formula; decode rows have {context} cached tokens, a prefill step is one row without any; rows "
        "sample with truncation and a mask. Repeated reads that a chip cache can serve count as moved"
    )
    return table


def report_record(
    recipe: Recipe, specs: Sequence[KernelSpec], kernels: Kernels, found: Mapping[str, Mapping[str, Traffic]]
) -> dict[str, Any]:
    """Both tables for `--json`."""
    return {
        "recipe": recipe.name,
        "kernels": {
            arch: {
                spec.name: {"function": spec.function, "constants": dict(spec.constants), **asdict(by_name[spec.name])}
                for spec in specs
            }
            for arch, by_name in kernels.items()
        },
        "traffic": {
            operator: {key: {**asdict(one), "ratio": one.ratio} for key, one in by_step.items()}
            for operator, by_step in found.items()
        },
    }
