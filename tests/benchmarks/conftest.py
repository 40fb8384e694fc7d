"""Benchmarks are scripts: their folder is where they find each other."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
