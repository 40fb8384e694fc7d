"""Driver of ostinato itself for `peers.py`; runs in the current interpreter's environment, per benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peer_protocol import Loaded, LoadRequest, serve, versions_of


class OstinatoDriver:
    """A built bundle, through the public `LLM`."""

    def load(self, request: LoadRequest) -> Loaded:
        """Open the bundle, prefix cache off."""
        from ostinato.runtime import LLM, RuntimeConfig, SamplingParams

        self.sampling_params: Any = SamplingParams
        config = RuntimeConfig(prefix_cache=False, num_threads=request.threads)
        self.engine: Any = LLM(request.model, config, progress=False)
        return Loaded(_precision(Path(request.model)), versions_of("ostinato", "openvino"))

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """All prompts in one `LLM.generate`."""
        sampling = self.sampling_params(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        completions = self.engine.generate(prompts, sampling)
        return [list(completion.choices[0].token_ids) for completion in completions]


def _precision(bundle: Path) -> str:
    """What the manifest says about weights and cache."""
    manifest: dict[str, Any] = json.loads((bundle / "manifest.json").read_text())
    return f"{manifest['weights']} weights, {manifest['kv_cache']} cache"


if __name__ == "__main__":
    serve(OstinatoDriver())
