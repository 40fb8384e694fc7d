"""A process of its own that tries grammars out, so that one which explodes takes nobody along (runs per new grammar).

It reads a line of JSON with the tokenizer, then one a grammar, and answers each with a line. Each grammar gets a fork,
whose memory, stack and time are bounded: what exceeds them ends that fork alone, and the next one costs no start. It
imports nothing of ours, so that it starts fast.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

STACK_BYTES = 2 * 2**20  # less than any thread of a server's has
NICENESS = 10  # a tenth of what a step gets where both want the same core: trials must not slow the streams down
QUICK_SECONDS = 0.1  # of a processor: what takes longer may be a bomb, and runs on where steps leave a core alone
_LOOK_SECONDS = 0.02
_STARVED_SHARE = 0.5  # of a whole trial's time: who got less of a processor may do nothing wrong
NUM_WALKS, MAX_STEPS = 4, 48
STEP_SECONDS = 0.05  # of a processor's time: all rows of a step wait for each of its masks
WALK_SECONDS = 0.5
_READ_BYTES = 2**16
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # its end is that of its input
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # callers' grammars must not fill a disk
    setup = json.loads(sys.stdin.readline())
    try:
        tokenizer = llguidance.LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab_size"], eos_token=setup["eos_ids"])
    except Exception as error:
        _answer({"error": str(error)})
        return
    del setup["tokenizer"]
    _answer({})
    for line in sys.stdin:
        _answer(_forked(tokenizer, json.loads(line), setup))


def _answer(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _forked(tokenizer: llguidance.LLTokenizer, job: Mapping[str, Any], setup: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a fork says of a grammar, or why it says nothing."""
    deadline = time.monotonic() + job["seconds"]
    reader, writer = os.pipe()
    parent, child = os.getpid(), os.fork()
    if not child:
        os.close(reader)
        _be_the_fork(tokenizer, job, setup, writer, parent)
    os.close(writer)
    if _is_slow(reader, child, deadline):
        with suppress(PermissionError):  # where a sandbox forbids it, it stays as nice as it is
            os.sched_setscheduler(child, os.SCHED_IDLE, os.sched_param(0))
    said = _all_of(reader, deadline)
    os.close(reader)
    os.kill(child, signal.SIGKILL)
    used = os.wait4(child, 0)[2]
    if said is None:
        return _late(setup, used.ru_utime + used.ru_stime < _STARVED_SHARE * setup["trial_seconds"])
    if not said:
        return {"error": f"it needs more than {setup['max_bytes'] // 2**20} MiB, or nests too deep"}
    answer: Mapping[str, Any] = json.loads(said)
    return answer


def _is_slow(reader: int, child: int, deadline: float) -> bool:
    """Whether a fork has had QUICK_SECONDS of a processor, and said nothing. Time that it waits for one is no fault."""
    while time.monotonic() < deadline and not select.select([reader], [], [], _LOOK_SECONDS)[0]:
        with open(f"/proc/{child}/stat") as stat:
            user, system = stat.read().rpartition(")")[2].split()[11:13]
        if int(user) + int(system) >= QUICK_SECONDS * os.sysconf("SC_CLK_TCK"):
            return True
    return False


def _late(setup: Mapping[str, Any], is_starved: bool) -> Mapping[str, Any]:
    if is_starved:
        return {"busy": True}
    return {"error": f"it does not compile within {setup['max_seconds']:g} s"}


def _be_the_fork(
    tokenizer: llguidance.LLTokenizer, job: Mapping[str, Any], setup: Mapping[str, Any], writer: int, parent: int
) -> NoReturn:
    """Try the grammar within bounds, tell, and end. Nothing told: it went past a bound."""
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a server that ends its worker means this, too
        if os.getppid() == parent:
            os.nice(NICENESS)  # not the worker itself, which keeps the time
            most = _data_bytes() + setup["max_bytes"]
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
            try:
                answer = _try(tokenizer, job, setup)
            except Exception as error:
                answer = {"fault": str(error) or type(error).__name__}
            with open(writer, "wb") as pipe:
                pipe.write(json.dumps(answer).encode())
    finally:
        os._exit(0)


def _all_of(reader: int, deadline: float) -> bytes | None:
    """Everything up to the pipe's end, None where that does not come in time."""
    parts: list[bytes] = []
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (part := os.read(reader, _READ_BYTES)):
            return b"".join(parts)
        parts.append(part)
    return None


def _try(tokenizer: llguidance.LLTokenizer, job: Mapping[str, Any], setup: Mapping[str, Any]) -> Mapping[str, Any]:
    """Compile a grammar and follow it at random: its {"text"} and how many "bytes" it takes; or {"busy"}, {"error"}, or
    {"fault"} as native code tells it.
    """
    began_at, before = time.monotonic(), _heap_bytes()
    for pattern in job["patterns"]:
        if fault := llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_regex(pattern)):
            return {"fault": fault}
    text = job["head"] + (gbnf_to_lark(job["text"]) if job["is_gbnf"] else job["text"])
    limits = llguidance.LLParserLimits(verbose_errors=False, **setup["mask_bounds"])
    seed = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(text), log_level=0, limits=limits)
    if seed.is_error():
        return {"fault": seed.get_error()}
    compile_seconds = time.thread_time()
    rng = random.Random(0)
    deadline = time.thread_time() + WALK_SECONDS
    for _ in range(NUM_WALKS):
        if trouble := _walk(seed.deep_copy(), rng, deadline, frozenset(setup["special_ids"])):
            return trouble
    if time.monotonic() - began_at + compile_seconds > job["seconds"]:  # the server compiles it once more
        return _late(setup, time.thread_time() + compile_seconds <= setup["trial_seconds"])
    return {"text": text, "bytes": max(0, _heap_bytes() - before)}


def _walk(
    matcher: llguidance.LLMatcher, rng: random.Random, deadline: float, special_ids: frozenset[int]
) -> dict[str, str]:
    """Take random tokens that fit; why that can't be done in time, nothing if it can.

    It ends where text is forced that is a special token's name: which tokens spell it is the guide's affair.
    """
    for _ in range(MAX_STEPS):
        began_at = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        forced = matcher.compute_ff_tokens()
        seconds = time.thread_time() - began_at
        if matcher.is_error():
            return {"fault": matcher.get_error()}
        if seconds > STEP_SECONDS:
            return {"error": "it takes too long to find the tokens that may come next"}
        if matcher.is_stopped() or time.thread_time() > deadline or not special_ids.isdisjoint(forced):
            break
        if not mask:
            return {"error": "no token of the model's is legal at some place"}
        matcher.consume_token(_some_bit(mask, rng))
    return {}


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
    mallinfo = _LIBC.mallinfo2
    mallinfo.restype = _Heap
    heap = mallinfo()
    return int(heap.uordblks + heap.hblkhd)


if __name__ == "__main__":
    main()
