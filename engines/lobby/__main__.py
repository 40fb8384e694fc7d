"""`python -m ostinato`: the command (once per call). This folder is the package `ostinato` itself, less its rooms."""

from __future__ import annotations

import sys

from ostinato.engines.command import main

sys.exit(main())
