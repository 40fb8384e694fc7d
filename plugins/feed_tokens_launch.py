"""FeedTokens' launch rule: one kernel, the same for every step shape and model, a program a token (offline)."""

from __future__ import annotations

from ostinato.engines.program import StepShape

from .feed_tokens import FORMALS
from .kernel_launch import KernelSpec, Launch, Pointer

_KERNEL = KernelSpec(
    module="feed_tokens_kernel",
    function="feed_tokens",
    pointers=tuple(Pointer(name, "int32") for name in FORMALS),
    constants=(),
    num_warps=1,
)


def feed_tokens_launches(step: StepShape) -> tuple[Launch, ...]:
    """The launches of one call."""
    return (Launch(_KERNEL, (step.tokens, 1, 1)),)
