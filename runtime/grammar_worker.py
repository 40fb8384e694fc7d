"""A process of its own that tries grammars out, so that one which explodes takes nobody along (runs per new grammar).

It reads a line of JSON with the tokenizer, then one a grammar, and answers each with a line. It imports nothing of
ours, so that it starts fast. Its memory is bounded once the tokenizer is loaded, and its time for each grammar: what
exceeds that ends it, and so does a stack that overflows; whoever started it then knows enough.
"""

from __future__ import annotations

import ctypes
import json
import math
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

STACK_BYTES = 2 * 2**20  # less than any thread of a server's has
SPARE = 2.0  # so that a server which is there speaks first
NUM_WALKS, MAX_STEPS = 4, 48
STEP_SECONDS = 0.1  # of a processor's time: all rows of a step wait for each of its masks
WALK_SECONDS = 0.5


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # its end is that of its input
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # callers' grammars must not fill a disk
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    setup = json.loads(sys.stdin.readline())
    special_ids = frozenset(setup["special_ids"])
    try:
        tokenizer = llguidance.LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab_size"], eos_token=setup["eos_ids"])
        _heap_bytes()  # what it loads is not of a grammar
    except Exception as error:
        _answer({"error": str(error)})
        return
    most = _data_bytes() + setup["max_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    _answer({})
    for line in sys.stdin:
        _limit_seconds(setup["max_seconds"])
        before = _heap_bytes()
        try:
            answer = _try(tokenizer, json.loads(line), special_ids)
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        _answer({**answer, "kept_bytes": max(0, _heap_bytes() - before)})


def _limit_seconds(seconds: float) -> None:
    """Of a processor's time from now on, for a worker whose server was killed and can't end it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = usage.ru_utime + usage.ru_stime
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used + SPARE * seconds) + 1, resource.RLIM_INFINITY))


def _answer(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _try(tokenizer: llguidance.LLTokenizer, job: Mapping[str, Any], special_ids: frozenset[int]) -> Mapping[str, Any]:
    """Compile a grammar and follow it at random: {"error"}, or its {"text"} and how many "bytes" it takes."""
    before = _heap_bytes()
    text = job["head"] + (gbnf_to_lark(job["text"]) if job["is_gbnf"] else job["text"])
    limits = llguidance.LLParserLimits(verbose_errors=False)
    seed = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(text), log_level=0, limits=limits)
    if seed.is_error():
        return {"error": seed.get_error()}
    rng = random.Random(0)
    deadline = time.thread_time() + WALK_SECONDS
    for _ in range(NUM_WALKS):
        if error := _walk(seed.deep_copy(), rng, deadline, special_ids):
            return {"error": error}
    return {"text": text, "bytes": max(0, _heap_bytes() - before)}


def _walk(matcher: llguidance.LLMatcher, rng: random.Random, deadline: float, special_ids: frozenset[int]) -> str:
    """Take random tokens that fit; why that can't be done in time, "" if it can.

    It ends where text is forced that is a special token's name: which tokens spell it is the guide's affair.
    """
    for _ in range(MAX_STEPS):
        began_at = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        forced = matcher.compute_ff_tokens()
        seconds = time.thread_time() - began_at
        if matcher.is_error():
            return matcher.get_error()
        if seconds > STEP_SECONDS:
            return "it takes too long to find the tokens that may come next"
        if matcher.is_stopped() or time.thread_time() > deadline or not special_ids.isdisjoint(forced):
            break
        if not mask:
            return "no token of the model's is legal at some place"
        matcher.consume_token(_some_bit(mask, rng))
    return ""


def _some_bit(mask: int, rng: random.Random) -> int:
    """A random bit's number, the next one that is set from a random place on."""
    start = rng.randrange(mask.bit_length())
    above = mask >> start
    return start + (above & -above).bit_length() - 1


def _data_bytes() -> int:
    """What RLIMIT_DATA counts."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


class _Heap(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _heap_bytes() -> int:
    """What is allocated now, as glibc tells."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Heap
    heap = mallinfo()
    return int(heap.uordblks + heap.hblkhd)


if __name__ == "__main__":
    main()
