"""FeedTokens: tokens that the step before sampled become this step's input, its names and its NumPy oracle (in tests).

    feed_rows[t] >= 0   input_ids[t] = max(last_tokens[feed_rows[t]], 0)
    feed_rows[t] < 0    input_ids[t] stays: the host knew the token, or t is a pad

So a step is launched while the one before still runs. `last_tokens` is where sampling writes: of a step that runs
first in its stream it still holds what the step before left there. A row that had no legal token (-1) is fed token 0:
it has failed, and what it computes is dropped.

A call of the program, first in the step; no graph has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

FEED_TOKENS = "FeedTokens"
FORMALS = ("input_ids", "feed_rows", "last_tokens")


def feed_tokens(inputs: Mapping[str, Array]) -> Array:
    """`input_ids` [T] as it is afterwards, a new array here; a kernel changes it in place. Arrays by `FORMALS`."""
    is_fed = inputs["feed_rows"] >= 0
    fed: Array = inputs["input_ids"].copy()
    fed[is_fed] = np.maximum(inputs["last_tokens"][inputs["feed_rows"][is_fed]], 0)
    return fed
