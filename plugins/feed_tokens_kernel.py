"""FeedTokens' kernel: one program a token of the step (per step, first launch). Launch rule: `feed_tokens_launch`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def feed_tokens(input_ids, feed_rows, last_tokens):
    """input_ids[t] = max(last_tokens[feed_rows[t]], 0), where feed_rows[t] names a row."""
    token = tl.program_id(0)
    row = tl.load(feed_rows + token)
    if row >= 0:
        tl.store(input_ids + token, tl.maximum(tl.load(last_tokens + row), 0))
