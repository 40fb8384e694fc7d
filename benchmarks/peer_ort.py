"""Driver of ONNX Runtime GenAI for `peers.py`; runs in `.peers/ort`, per benchmark.

`--prepare FROM TO` makes the model, once at setup.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from typing import Any

from peer_protocol import Loaded, LoadRequest, serve, versions_of

BUILD_OPTIONS = {"int4_accuracy_level": "4", "int4_block_size": "32"}  # 4: int8 activations


class OrtDriver:
    """The model builder's int4 graph, through `onnxruntime_genai.Generator`."""

    def load(self, request: LoadRequest) -> Loaded:
        """Open the folder that the model builder made."""
        import numpy
        import onnxruntime_genai

        self.numpy: Any = numpy
        self.genai: Any = onnxruntime_genai
        self.model: Any = onnxruntime_genai.Model(request.model)
        options = ", ".join(f"{name}={value}" for name, value in BUILD_OPTIONS.items())
        return Loaded(
            "int4 weights (block 32), int8 activations, f32 cache",
            versions_of("onnxruntime-genai", "onnxruntime"),
            options,
        )

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """One `Generator` of fixed length: min_length = max_length keeps end-of-sequence from being chosen."""
        length = len(prompts[0]) + new_tokens
        params = self.genai.GeneratorParams(self.model)
        params.set_search_options(do_sample=False, batch_size=len(prompts), max_length=length, min_length=length)
        generator = self.genai.Generator(self.model, params)
        generator.append_tokens(self.numpy.array(prompts, dtype=self.numpy.int32))
        for _ in range(new_tokens):
            generator.generate_next_token()
        return [[int(token) for token in generator.get_sequence(row)[-new_tokens:]] for row in range(len(prompts))]


def prepare(source: str, folder: str) -> None:
    """Run the model builder: int4, CPU."""
    options = [f"{name}={value}" for name, value in BUILD_OPTIONS.items()]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "--input", source, "--output", folder]
    with tempfile.TemporaryDirectory() as cache:
        command += ["--cache_dir", cache, "--precision", "int4", "--execution_provider", "cpu", "--extra_options"]
        subprocess.run([*command, *options], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--prepare"]:
        prepare(*sys.argv[2:4])
    else:
        serve(OrtDriver())
