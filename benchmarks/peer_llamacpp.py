"""Driver of llama.cpp for `peers.py`; runs in `.peers/llamacpp`, per benchmark.

Rows share a step through the low-level batch API (`llama_batch`, one sequence a row): the high-level class takes one
row only. Sampling is an argmax over the logits in NumPy.
"""

from __future__ import annotations

import ctypes
from typing import Any

from peer_protocol import Loaded, LoadRequest, serve, versions_of

STEP_TOKENS = 512  # llama.cpp's default micro-batch


class LlamaCppDriver:
    """GGUF as published, through llama.cpp's C API."""

    def load(self, request: LoadRequest) -> Loaded:
        """Open the GGUF and make a context with one sequence a row."""
        import llama_cpp
        import numpy

        self.api: Any = llama_cpp
        self.numpy: Any = numpy
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            request.model.encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {request.model}")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = request.rows * request.tokens, request.rows
        params.n_batch = params.n_ubatch = STEP_TOKENS
        params.n_threads = params.n_threads_batch = request.threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp could not make a context")
        self.batch = llama_cpp.llama_batch_init(STEP_TOKENS, 0, 1)
        features = llama_cpp.llama_print_system_info().decode()
        return Loaded("Q4_1 weights (as published), f16 cache", versions_of("llama-cpp-python"), features)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Prefill row by row (a prompt fills a step), then decode all rows together."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        outputs = [[self._prefill(row, prompt)] for row, prompt in enumerate(prompts)]
        for step in range(new_tokens - 1):
            lines = [
                (output[-1], len(prompt) + step, row, True)
                for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
            ]
            self._decode(lines)
            for row, output in enumerate(outputs):
                output.append(self._argmax(row))
        return outputs

    def _prefill(self, row: int, prompt: list[int]) -> int:
        for start in range(0, len(prompt), STEP_TOKENS):
            part = prompt[start : start + STEP_TOKENS]
            self._decode([(token, start + i, row, start + i == len(prompt) - 1) for i, token in enumerate(part)])
        return self._argmax(len(part) - 1)

    def _decode(self, lines: list[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        batch.n_tokens = len(lines)
        for i, (token, position, row, wanted) in enumerate(lines):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        status = self.api.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {len(lines)} tokens")

    def _argmax(self, line: int) -> int:
        logits = self.api.llama_get_logits_ith(self.context, line)
        pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(self.numpy.ctypeslib.as_array(pointer, (self.vocabulary,)).argmax())


if __name__ == "__main__":
    serve(LlamaCppDriver())
