"""A tiny bundle built and served on this GPU, for every TensorRT that is here: the tokens of the CPU target."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato.engines.targets import TARGETS

from .found import found_tensorrt
from .gpu import Gpu


@pytest.mark.parametrize("target", ["rtx", "trt"])
def test_a_bundle_gives_the_tokens_of_the_cpu(gpu: Gpu, tmp_path: Path, target: str) -> None:
    if target not in found_tensorrt():
        pytest.skip(f"no TensorRT for target {target} is here")
    pytest.importorskip("openvino", reason="the CPU target's answers are what is compared with")
    capability = gpu.device.compute_capability
    if capability not in TARGETS[target].compute_capabilities:
        pytest.skip(f"target {target} is not for GPUs of compute capability {capability}")
    from .bundle_checks import check_bundle

    check_bundle(tmp_path, target, capability)
