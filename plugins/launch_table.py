"""An operator's launches for every step shape, as an engine carries them (written offline, read once at start).

An operator inside an engine sees no step shape, only the sizes of its tensors: these are the keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ostinato.engines.errors import BundleError, DeviceError
from ostinato.engines.program import KernelLaunch

Sizes = tuple[int, ...]  # what an operator tells step shapes apart by, such as (tokens, rows)


@dataclass(frozen=True)
class StepLaunches:
    """One step's launches in order. `scratch`: name → byte offset in a workspace of `workspace_bytes`."""

    launches: tuple[KernelLaunch, ...]
    scratch: Mapping[str, int]
    workspace_bytes: int


@dataclass(frozen=True)
class LaunchTable:
    """Every step's launches by its sizes."""

    steps: Mapping[Sizes, StepLaunches]

    def at(self, sizes: Sizes) -> StepLaunches:
        """The launches for exactly these sizes. Raises DeviceError if none are recorded."""
        if sizes not in self.steps:
            known = ", ".join(map(str, sorted(self.steps)))
            raise DeviceError(
                f"a step of sizes {sizes} was asked for, recorded are {known}: pad it to a bucket of the bundle"
            )
        return self.steps[sizes]

    def workspace_bytes(self, largest: Sizes) -> int:
        """What the largest recorded step within `largest` needs; each size counts on its own."""
        return max(
            (
                step.workspace_bytes
                for sizes, step in self.steps.items()
                if all(size <= limit for size, limit in zip(sizes, largest, strict=True))
            ),
            default=0,
        )

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of all cubins, each once."""
        return tuple(sorted({launch.kernel for step in self.steps.values() for launch in step.launches}))

    def to_json(self) -> str:
        steps = [
            {
                "sizes": list(sizes),
                "launches": [[launch.kernel, list(launch.grid), list(launch.arguments)] for launch in step.launches],
                "scratch": dict(step.scratch),
                "workspace_bytes": step.workspace_bytes,
            }
            for sizes, step in sorted(self.steps.items())
        ]
        return json.dumps(steps, separators=(",", ":"), sort_keys=True)


def launch_table_from_json(text: str) -> LaunchTable:
    """Read what `to_json` wrote. Raises BundleError for anything else."""
    try:
        return LaunchTable(
            {
                tuple(map(int, step["sizes"])): StepLaunches(
                    tuple(
                        KernelLaunch(kernel, (x, y, z), tuple(arguments))
                        for kernel, (x, y, z), arguments in step["launches"]
                    ),
                    {name: int(offset) for name, offset in step["scratch"].items()},
                    int(step["workspace_bytes"]),
                )
                for step in json.loads(text)
            }
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BundleError(f"an engine's launches do not read ({error!r}): build the bundle again") from None
