"""A bundle on the simulated device: everything that its engines and kernels are, as `Libraries` for an executor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from ostinato.builder.rank_operators import rank_operators
from ostinato.engines.bundle import Bundle, open_bundle
from ostinato.engines.engine_record import EngineInfo
from ostinato.engines.manifest import Manifest
from ostinato.engines.program import Program, program_from_json
from ostinato.engines.recipe import Recipe
from ostinato.engines.shards import Shards
from ostinato.engines.sizes import Limits
from ostinato.runtime.buffers import StepBuffers
from ostinato.runtime.gpu_rank import device_limits
from ostinato.runtime.libraries import Libraries

from .bundle_kernels import interpret, kernel_body
from .driver import SimDriver
from .engine_graph import engine_compute
from .kernel_views import KernelForm
from .kernels import SimKernel
from .tensorrt import STAND_IN, EngineSpec, SimTensorRT, SimTensorRTRTX

_MEMORY = 4096  # bytes of activations of an engine's first profile


@dataclass(frozen=True)
class SimulatedRank:
    """One rank's device with all that its bundle registers. `tensorrt`, `driver`: where tests set faults."""

    bundle: Bundle
    program: Program
    driver: SimDriver
    tensorrt: SimTensorRT

    def libraries(self, nccl: Any = None) -> Libraries:
        return Libraries(self.driver, self.tensorrt, nccl, self.driver.clock.now, self.driver.clock.sleep)


def simulated(
    path: Path,
    *,
    rank: int = 0,
    seed: int | None = None,
    limits: Limits | None = None,
    capacity: int = 8 << 30,
    interpreted: bool = False,
) -> SimulatedRank:
    """`seed`: of the order that work runs in; None: as late as possible. `limits`: what the executor is made with.

    `interpreted`: run kernels in Triton's interpreter, which takes minutes where NumPy takes seconds.
    """
    bundle = open_bundle(path)
    manifest, folder = bundle.manifest, path / f"rank{rank}"
    program = program_from_json((folder / "program.json").read_text(), folder / "program.json")
    driver = SimDriver(seed=seed, capacity=capacity, num_devices=manifest.shards.num_ranks)
    major, minor = manifest.compute_capabilities[-1].split(".")
    driver.capability = (int(major), int(minor))
    forms = kernel_forms(manifest, rank, device_limits(manifest, limits or manifest.limits))
    _register_kernels(driver, program, forms, folder, interpreted)
    tensorrt = (SimTensorRTRTX if manifest.target == "rtx" else SimTensorRT)(driver)
    for info in manifest.engines[rank]:
        tensorrt.__version__ = info.version
        tensorrt.register((folder / info.file).read_bytes(), _spec(info, folder, forms, manifest.shards))
    return SimulatedRank(bundle, program, driver, tensorrt)


def kernel_forms(manifest: Manifest, rank: int, limits: Limits) -> dict[str, KernelForm]:
    """Every kernel that a rank may launch, by name. `limits`: of how many blocks and state lines there are."""
    recipe = Recipe(
        manifest.name, "", manifest.target, manifest.weights, manifest.kv_cache, manifest.limits,
        compute_capabilities=manifest.compute_capabilities, shards=manifest.shards, tensorrt=manifest.tensorrt,
    )  # fmt: skip
    operators = rank_operators(manifest.sizes, recipe, manifest.shards.shard(rank))
    specs = {
        launch.kernel.name: launch.kernel
        for step in operators.steps
        for launches in operators.launches(step).values()
        for launch in launches
    }
    return {name: KernelForm(spec, limits.num_blocks, limits.num_state_lines) for name, spec in specs.items()}


def _register_kernels(
    driver: SimDriver, program: Program, forms: dict[str, KernelForm], folder: Path, interpreted: bool
) -> None:
    for architecture, infos in program.kernels.items():
        if unknown := infos.keys() - forms.keys():
            raise AssertionError(f"no body for {sorted(unknown)}: the attention's attributes are not the usual ones")
        for name, info in infos.items():
            form = forms[name]
            body = kernel_body(form, interpret if interpreted else None)
            kernel = SimKernel(
                name, body, len(form.spec.pointers), info.num_hidden_pointers, max(48 << 10, info.shared_bytes)
            )
            driver.kernels.register(kernel, (folder / "kernels" / architecture / f"{name}.cubin").read_bytes())


def _spec(info: EngineInfo, folder: Path, forms: dict[str, KernelForm], shards: Shards) -> EngineSpec:
    outputs = {tensor.name for tensor in info.outputs}
    sources = {tensor.name for tensor in info.inputs}
    aliases = {name: name.removesuffix(".out") for name in outputs if name.removesuffix(".out") in sources - outputs}
    return EngineSpec(
        name=Path(info.file).stem,
        inputs=info.inputs,
        outputs=info.outputs,
        profiles=info.profiles,
        compute=engine_compute(_graph(info, folder), forms, shards.tensor_parallel),
        memory_bytes=tuple(_MEMORY * (1 + place) for place in range(len(info.profiles))),
        aliases=aliases,
    )


def _graph(info: EngineInfo, folder: Path) -> onnx.ModelProto:
    """What the engine computes: a stand-in holds it; a real one's lies beside it."""
    image = (folder / info.file).read_bytes()
    if image.startswith(STAND_IN):
        return onnx.load_model_from_string(image[len(STAND_IN) :])
    name = f"{Path(info.file).stem}.onnx"
    if (kept := folder / "refit" / name).exists():
        return onnx.load(kept)
    model = onnx.load(folder / "graphs" / name)
    if missing := {value.name for value in model.graph.input} - {tensor.name for tensor in info.inputs}:
        raise AssertionError(
            f"{info.file} holds {sorted(missing)[0]}, which is nowhere else: build it with stripped weights"
        )
    return model


def fence(rank: SimulatedRank, buffers: StepBuffers) -> None:
    """From now on no kernel and no engine of the rank may reach from one buffer into the next."""
    layout = buffers.layout
    for shape in (shape for shape in rank.program.step_shapes if shape.key in layout.inputs):
        addresses = buffers.addresses(shape)
        for part in (layout.inputs[shape.key], layout.outputs[shape.key], *layout.blocks.values()):
            for name, place in part.places.items():
                if place.num_bytes:
                    rank.driver.memory.fence(addresses[name], place.num_bytes)
