"""Driver of OpenVINO GenAI for `peers.py`; runs in `.peers/openvino`, per benchmark.

Continuous batching for every row count, prefix cache off; int4 weights by NNCF, the runtime's own 8-bit cache.
`--prepare FROM TO` makes the model, once at setup.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from peer_protocol import Loaded, LoadRequest, serve, versions_of

CACHE_GIB = 2
STEP_TOKENS = 4096
GROUP_SIZE = 64  # hidden size 576 is a multiple of 64, not of NNCF's default 128


class OpenVinoDriver:
    """OpenVINO IR with int4 weights, through `ContinuousBatchingPipeline`."""

    def load(self, request: LoadRequest) -> Loaded:
        """Compile the IR for this CPU."""
        import numpy
        import openvino
        import openvino_genai

        self.genai: Any = openvino_genai
        self.tensor: Any = lambda ids: openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_GIB, False
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = request.rows, STEP_TOKENS
        properties = {"INFERENCE_NUM_THREADS": request.threads, "PERFORMANCE_HINT": "LATENCY"}
        self.engine: Any = openvino_genai.ContinuousBatchingPipeline(request.model, scheduler, "CPU", properties)
        precision = f"int4 weights (group {GROUP_SIZE}), int8 activations and cache"
        return Loaded(precision, versions_of("openvino-genai", "openvino", "nncf", "optimum-intel"))

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """All prompts in one `generate`."""
        config = self.genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        results = self.engine.generate([self.tensor(prompt) for prompt in prompts], [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]


def prepare(source: str, folder: str) -> None:
    """Export the Hugging Face folder to IR with int4 weights, and the tokenizer beside it."""
    command = [
        "export",
        "openvino",
        "--model",
        source,
        "--task",
        "text-generation-with-past",
        "--weight-format",
        "int4",
    ]
    command += ["--sym", "--group-size", str(GROUP_SIZE), "--ratio", "1.0", folder]
    subprocess.run([str(Path(sys.executable).with_name("optimum-cli")), *command], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--prepare"]:
        prepare(*sys.argv[2:4])
    else:
        serve(OpenVinoDriver())
