"""THE SHOP: serves a bundle. Desk (request … sampling), machine (executors), door (loop … server).

The public names are imported on first use, so that a desk file never loads a device library.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import RuntimeConfig
    from .llm import LLM, Choice, Completion
    from .request import SamplingParams

# Through this package OpenVINO reports over the network that it was imported; where there is none, it does not.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

__all__ = ["LLM", "Choice", "Completion", "RuntimeConfig", "SamplingParams"]

_HOMES = {"LLM": "llm", "Choice": "llm", "Completion": "llm", "RuntimeConfig": "config", "SamplingParams": "request"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
