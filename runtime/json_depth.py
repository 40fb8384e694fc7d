"""How deep JSON is nested and how many objects it has, before anything parses it (lines run per request)."""

from __future__ import annotations

import numpy as np

from ostinato.engines.errors import RequestError

_KEPT = b'"[]{}'
_DROPPED = bytes(code for code in range(256) if code not in _KEPT)


def check_shape(raw: bytes, max_depth: int, max_objects: int) -> None:
    """Raises RequestError where arrays and objects are nested deeper, or there are more objects, each of which costs
    time to be checked. Of text that is no JSON the answer is any.
    """
    if raw.count(b"[") + raw.count(b"{") <= min(max_depth, max_objects):
        return
    # Without what is escaped, every quote begins or ends a string.
    marks = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _DROPPED), np.uint8)
    is_outside = np.cumsum(marks == ord('"'), dtype=np.int32) % 2 == 0
    opens = (marks == ord("[")) | (marks == ord("{"))
    closes = (marks == ord("]")) | (marks == ord("}"))
    steps = (opens & is_outside).astype(np.int8) - (closes & is_outside).astype(np.int8)
    if int(np.cumsum(steps, dtype=np.int32).max()) > max_depth:
        raise RequestError(f"the body's JSON is nested deeper than {max_depth}: flatten it", code="invalid_json")
    if (num_objects := int(((marks == ord("{")) & is_outside).sum())) > max_objects:
        raise RequestError(
            f"the body's JSON has {num_objects} objects, at most {max_objects} are allowed: send fewer",
            code="invalid_json",
        )
