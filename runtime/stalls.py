"""Which hand-off stalls: spans of recent calls in groups, and for each what to change (read by `ostinato diagnose`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_STALL = 0.25  # of the calls' time: below, no hand-off is worth a change


class Group(NamedTuple):
    """Spans that one change helps. `is_work`: what the calls came for, no hand-off."""

    name: str
    spans: tuple[str, ...]
    means: str
    change: str
    is_work: bool = False


def _both(*phases: str) -> tuple[str, ...]:
    return tuple(f"{stage}_{phase}" for stage in ("prefill", "decode") for phase in phases)


GROUPS = (
    Group("read", ("read",), "the server waits for the bodies of requests",
          "look at the clients' uplink and at the proxy before the server, which should buffer bodies"),
    Group("parse", ("auth", "parse", "other"), "bodies and routes are worked on before any text is looked at",
          "send smaller bodies (long histories, large logit_bias), and give the server's process a core of its own"),
    Group("tokenize", ("tokenize",), "text becomes tokens before the engine has the call",
          "send token ids, shorten the prompts, or give the machine's CPU more room: tokenizing is host work"),
    Group("grammar", ("grammar", *_both("grammar")), "grammars are compiled, or tell which tokens may come",
          "reuse schemas (a repeated one is found, not compiled), and make them smaller"),
    Group("queue: slots", ("queue_slots",), "calls wait for a row: all are taken",
          "raise --max-rows if memory allows it, or add a server"),
    Group("queue: blocks", ("queue_blocks",), "calls wait for KV blocks: the pool is full",
          "raise --kv-tokens, ask for fewer max_tokens, or shorten prompts"),
    Group("queue: budget", ("queue_budget",), "calls wait for tokens of a step: prompts take them all",
          "raise --max-step-tokens, or send shorter prompts"),
    Group("queue: tenant", ("queue_tenant",), "calls wait because their tenant has its share of the rows",
          "raise max_rows_per_tenant, or spread the tenant's calls over time"),
    Group("step turn", ("handoff", "queue_turn"), "calls wait for the step that runs to end",
          "lower --max-step-tokens, so that steps are shorter"),
    Group("plan and pack", _both("plan", "pack", "commit"), "the host decides and packs steps while the device waits",
          "give the loop's thread a core of its own; many rows or penalties cost host time"),
    Group("upload", _both("upload"), "steps are handed to the executor",
          "see whether graphs are replayed (graph_steps in /metrics) and the driver's thread has a core"),
    Group("execute", _both("execute"), "the executor computes",
          "use a smaller or more quantized model, a faster device, or fewer rows a step", is_work=True),
    Group("event loop", ("host", "idle", *_both("idle")), "tokens wait for the server's own thread",
          "give the server's process a core of its own, and fewer streams"),
    Group("detokenize", ("detokenize", "format"), "tokens become text and chunks",
          "ask for fewer logprobs and choices"),
    Group("write", ("write",), "answers wait for their readers: the sockets are full",
          "look at slow clients and at a proxy that does not read on; unread_seconds drops such readers sooner"),
)  # fmt: skip


class Verdict(NamedTuple):
    """What stalls. `stall`: the group's name, None if no hand-off does; `shares`: of all time, by group."""

    stall: str | None
    sentence: str
    num_calls: int
    mean_ms: float
    shares: dict[str, float]
    mean_ms_by_span: dict[str, float]


def judge(calls: Sequence[Mapping[str, float]]) -> Verdict:
    """The verdict on calls, each given as milliseconds by span."""
    if not calls:
        return Verdict(None, "No call has ended yet: send some, and ask again.", 0, 0.0, {}, {})
    totals: dict[str, float] = {}
    for spans in calls:
        for name, value in spans.items():
            totals[name] = totals.get(name, 0.0) + value
    whole = sum(totals.values()) or 1.0
    shares = {group.name: sum(totals.get(name, 0.0) for name in group.spans) / whole for group in GROUPS}
    mean = whole / len(calls)
    worst = max(GROUPS, key=lambda group: (not group.is_work, shares[group.name]))
    stall = worst.name if shares[worst.name] >= _STALL else None
    told = worst if stall is not None else next(group for group in GROUPS if group.is_work)
    part = f"{shares[told.name]:.0%} of a call's {mean:.0f} ms"
    if stall is not None:
        sentence = f"{told.name} takes {part}: {told.means}; {told.change}."
    else:
        sentence = f"No hand-off stalls; {told.name} takes {part}: {told.means}; to be faster, {told.change}."
    means = {name: value / len(calls) for name, value in totals.items()}
    return Verdict(stall, sentence, len(calls), mean, shares, means)
