"""Driver of vLLM's CPU backend for `peers.py`; runs in `.peers/vllm`, per benchmark.

As its manual advises, Intel's OpenMP is preloaded (tcmalloc, advised too, is in no Python package). `--prepare FROM`
loads the model once at setup: what torch.compile makes (minutes) is kept under `.peers/model/vllm` for later loads.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from peer_protocol import Loaded, LoadRequest, serve, versions_of

OPENMP = Path(sys.prefix) / "lib" / "libiomp5.so"
COMPILED = Path(sys.prefix).parent / "model" / "vllm"
ENVIRONMENT = {
    "LD_PRELOAD": str(OPENMP),
    "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    "VLLM_CACHE_ROOT": str(COMPILED),
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
STEP_TOKENS = 4096
PREPARED_ROWS, PREPARED_TOKENS = 32, 544  # what `peers.py` asks for by default


def best_dtype() -> str:
    """bfloat16 where this CPU computes in it; elsewhere it is emulated, and float32 is faster."""
    flags = Path("/proc/cpuinfo").read_text()
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


class VllmDriver:
    """The Hugging Face folder in bf16 or f32, through `vllm.LLM` in this process."""

    def load(self, request: LoadRequest) -> Loaded:
        """Start the engine in this process, prefix cache off."""
        import vllm

        self.vllm: Any = vllm
        dtype = best_dtype()
        self.engine = vllm.LLM(
            model=request.model,
            dtype=dtype,
            enable_prefix_caching=False,
            max_model_len=request.tokens,
            max_num_seqs=request.rows,
            max_num_batched_tokens=STEP_TOKENS,
            disable_log_stats=True,
        )
        return Loaded(f"{dtype} weights and cache", versions_of("vllm-cpu", "torch"))

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """All prompts in one `LLM.generate`."""
        sampling = self.vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = self.engine.generate(requests, sampling, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]


def main() -> None:
    """Start again with vLLM's environment, which has to be there before the process is; then serve."""
    if os.environ.get("LD_PRELOAD") != ENVIRONMENT["LD_PRELOAD"]:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    if sys.argv[1:2] == ["--prepare"]:
        VllmDriver().load(LoadRequest(sys.argv[2], PREPARED_ROWS, PREPARED_TOKENS, 0))
    else:
        serve(VllmDriver())


if __name__ == "__main__":
    main()
