"""A verdict as tables for the terminal and as JSON for the record (offline)."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ostinato.engines.errors import BuildError
from ostinato.engines.manifest import Manifest

from .verify import MAX_MEAN_KL, MIN_TOP1, NUM_TOKENS, ScheduleResult, Verdict

_CPUINFO = Path("/proc/cpuinfo")
_MEASURED = ("–", "measured")


def verdict_view(manifest: Manifest, verdict: Verdict) -> Group:
    """Two tables of at most 80 columns: how many prompts gave which tokens by schedule, and what that is worth."""
    of = f"{manifest.name}, target {manifest.target}: weights {manifest.weights}, KV cache {manifest.kv_cache}"
    positions = f"Divergence and best token: over {verdict.num_positions} positions of the bundle's own answers."
    return Group(Text(of), _schedule_table(verdict), Text(_where(verdict)), _check_table(verdict), Text(positions))


def _schedule_table(verdict: Verdict) -> Table:
    table = Table("schedule", "as transformers", "as alone", box=box.SIMPLE_HEAD)
    exact, alike = verdict.must_be_identical, verdict.must_be_as_alone
    for result in verdict.schedules:
        table.add_row(
            result.schedule.name,
            _count(result.num_identical, result, exact),
            _count(result.num_as_alone, result, exact or alike),
        )
    return table


def _where(verdict: Verdict) -> str:
    told = f"Prompts of which all {NUM_TOKENS} greedy tokens are the same; transformers runs in float32."
    places = [place for result in verdict.schedules for place in result.differences]
    if not places:
        return told
    margins = [place.margin for place in places]
    return (
        f"{told} First difference: prompt {places[0].prompt}, token {places[0].token}. Where an answer leaves it, "
        f"transformers prefers its own token by {min(margins):.2g} to {max(margins):.2g} logits."
    )


def _check_table(verdict: Verdict) -> Table:
    """What was found, what was wanted, and whether that is enough; what nothing is wanted of is only measured."""
    table = Table("check", "found", "wanted", "", box=box.SIMPLE_HEAD)
    exact = verdict.must_be_identical
    worst = min(verdict.schedules, key=lambda result: result.num_identical)
    table.add_row(
        "as transformers, every schedule",
        _share(worst.num_identical, worst.num_prompts),
        *(("all", _word(not worst.differences)) if exact else _MEASURED),
    )
    if exact or verdict.must_be_as_alone:
        worst = min(verdict.schedules, key=lambda result: result.num_as_alone)
        found = _share(worst.num_as_alone, worst.num_prompts)
        table.add_row("as alone, every schedule", found, "all", _word(verdict.is_as_alone))
    elif together := _together(verdict):
        found = _share(together.num_as_alone, together.num_prompts)
        table.add_row(f"as alone, in a batch of {together.schedule.max_rows}", found, *_MEASURED)
    close, same = verdict.mean_kl <= MAX_MEAN_KL, verdict.top1 >= MIN_TOP1
    table.add_row("mean KL divergence", f"{verdict.mean_kl:.1e} nats", f"at most {MAX_MEAN_KL}", _word(close))
    table.add_row("same best token", f"{verdict.top1:.2%}", f"at least {MIN_TOP1:.0%}", _word(same))
    table.add_section()
    table.add_row("verdict", "", "", "good" if verdict.is_good else "FAILED")
    return table


def save_verdict(file: Path, manifest: Manifest, verdict: Verdict, command: str) -> None:
    """Put the verdict into `file` under the bundle's name; other bundles' entries stay. Raises BuildError."""
    entries: dict[str, Any] = {}
    if file.exists():
        try:
            entries = dict(json.loads(file.read_text()))
        except (ValueError, TypeError):
            raise BuildError(f"{file} is not a file of verdicts: give --json another name, or remove it") from None
    entries[manifest.name] = _entry(manifest, verdict, command)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")


def _entry(manifest: Manifest, verdict: Verdict, command: str) -> dict[str, Any]:
    together = _together(verdict)
    return {
        "command": command,
        "machine": {"cpu": _cpu_model(), "cores": len(os.sched_getaffinity(0))},
        "identity": manifest.identity,
        "weights": manifest.weights,
        "kv_cache": manifest.kv_cache,
        "reference": "transformers, float32",
        "tokens_a_prompt": NUM_TOKENS,
        "must_be_identical": verdict.must_be_identical,
        "must_be_as_alone": verdict.must_be_as_alone,
        "schedules": [_schedule_entry(result) for result in verdict.schedules],
        "alone_as_in_a_batch": together and together.num_as_alone / together.num_prompts,
        "mean_kl_nats": verdict.mean_kl,
        "same_best_token": verdict.top1,
        "positions": verdict.num_positions,
        "is_good": verdict.is_good,
    }


def _schedule_entry(result: ScheduleResult) -> dict[str, Any]:
    return {
        "name": result.schedule.name,
        "max_rows": result.schedule.max_rows,
        "max_step_tokens": result.schedule.max_step_tokens,
        "prompts": result.num_prompts,
        "as_reference": result.num_identical,
        "as_alone": result.num_as_alone,
        "differences": [[place.prompt, place.token, place.margin] for place in result.differences],
    }


def _together(verdict: Verdict) -> ScheduleResult | None:
    """The result of whole prompts in a batch, None where the bundle takes one row."""
    alone = verdict.schedules[0].schedule
    for result in verdict.schedules:
        schedule = result.schedule
        if schedule.max_rows > 1 and schedule.max_step_tokens == alone.max_step_tokens and not schedule.prefix_cache:
            return result
    return None


def _count(count: int, result: ScheduleResult, is_wanted: bool) -> str:
    failed = " FAILED" if is_wanted and count < result.num_prompts else ""
    return f"{count} of {result.num_prompts}{failed}"


def _share(count: int, total: int) -> str:
    return f"{count} of {total} prompts"


def _word(good: bool) -> str:
    return "ok" if good else "FAILED"


def _cpu_model() -> str:
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
