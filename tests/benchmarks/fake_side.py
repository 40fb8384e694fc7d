"""A side of the latency gate without a model: its bundle's manifest says how long a step takes (run by the gate)."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

from latency_side import Side, serve


class FakeSide(Side):
    """Steps of `step_ms`, give or take 2%; `fails`: which operation it can't do."""

    def open(self, bundle: str, cores: list[int], rows: int) -> dict[str, Any]:
        self._manifest = json.loads((Path(bundle) / "manifest.json").read_text())
        self._random = random.Random(bundle)
        found = importlib.util.find_spec("ostinato.engines")
        assert found is not None
        assert found.origin is not None
        return {"bundle": bundle, "identity": "0" * 64, "package": str(Path(found.origin).parent)}

    def prompt(self, prompts: list[str], max_tokens: int) -> dict[str, Any]:
        if self._manifest.get("fails") == "prompt":
            raise ValueError("the prompt is too long")
        return self._took(1)

    def decode(self, steps: int) -> dict[str, Any]:
        if self._manifest.get("fails") == "decode":
            raise SystemExit("out of memory")
        return self._took(steps)

    def _took(self, steps: int) -> dict[str, Any]:
        seconds = [self._manifest["step_ms"] / 1e3 * self._random.gauss(1.0, 0.02) for _ in range(steps)]
        return {"wall": seconds, "cpu": seconds}


if __name__ == "__main__":
    serve(FakeSide())
