"""Every kernel of a bundle's program as NumPy on the simulated device, or in Triton's interpreter (in tests)."""

from __future__ import annotations

from collections.abc import Callable

from ostinato.plugins.kernel_launch import Launch

from . import attention_bodies, sampling_bodies
from .kernel_views import KernelForm, Views
from .kernels import Grid, KernelBody
from .memory import DeviceMemory, as_dtype

Body = Callable[[Views], None]
BODIES: dict[str, Body] = {
    body.__name__: body
    for body in (
        attention_bodies.cache_write, attention_bodies.decode_splits, attention_bodies.decode_join,
        attention_bodies.prefill_attention, sampling_bodies.feed_tokens, sampling_bodies.adjust_logits,
        sampling_bodies.weigh_blocks, sampling_bodies.pack_candidates, sampling_bodies.draw_tokens,
        sampling_bodies.report_logprobs,
    )
}  # fmt: skip


def kernel_body(form: KernelForm, body: Body | None = None) -> KernelBody:
    """What the driver calls when the kernel runs; `body`: another one than the kernel's own."""
    run, names = body or BODIES[form.spec.function], [pointer.name for pointer in form.spec.pointers]

    def launched(memory: DeviceMemory, grid: Grid, pointers: tuple[int, ...]) -> None:
        run(Views(form, memory, grid, dict(zip(names, pointers, strict=True))))

    return launched


def interpret(views: Views) -> None:
    """In place of a body: the kernel itself, in Triton's interpreter, over the same memory.

    A pointer's array reaches to the end of its buffer, or to that of its allocation where there are no fences.
    """
    from ..interpreter import run_launches  # Triton, and torch

    memory, form = views.memory, views.form
    tensors = {}
    for name, address in views.addresses.items():
        block = memory.block(address, 0, name)
        end = block.fences.get(address, block.address + block.num_bytes)
        kind = as_dtype(form.dtypes[name])
        tensors[name] = memory.view(address, kind, ((end - address) // kind.itemsize,), f"{form.name}'s {name}")
    run_launches([Launch(form.spec, views.grid)], tensors)
